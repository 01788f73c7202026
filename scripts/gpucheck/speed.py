"""The machine's own rates, and how near to them the attention kernels come."""

import dataclasses
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpucheck.bench import L2_BYTES, Bench
from gpucheck.cases import Case
from gpucheck.kernels import kv_dtypes
from kvctl.engine.cascade import CascadeRule, device_bytes_per_s
from kvctl.sizing.kernel_time import decode_work, prefill_work
from kvctl_kernels.metadata import AttentionMetadata

Row = dict[str, Any]
Sets = list[tuple[torch.Tensor, torch.Tensor]]


def environment(bench: Bench) -> Iterator[Row]:
    """Versions, the GPU, and what Triton needs to launch anything: a C compiler and Python's headers."""
    import triton

    found: Row = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    found["c_compiler"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    found["python_headers"] = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    if not bench.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "sm": properties.multi_processor_count, "memory": properties.total_memory}
        found |= {"capability": list(torch.cuda.get_device_capability()), "arch": bench.ops().arch}
    yield found


def ceilings(bench: Bench) -> Iterator[Row]:
    """Copy rate (read plus write) and bf16 matmul rate."""
    count = 1 << 10 if bench.dry else 1 << 30
    source = torch.ones(count, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.median_s(lambda _: target.copy_(source))
    size = 64 if bench.dry else 8192
    a = torch.randn(size, size, device=bench.device).bfloat16()
    matmul_s = bench.median_s(lambda _: a @ a)
    found = bench.ceilings()
    if copy_s and matmul_s:
        found = dataclasses.replace(found, bytes_per_s=2 * count / copy_s, flop_per_s=2 * size**3 / matmul_s)
    yield dataclasses.asdict(found)


def _kv_bytes(case: Case) -> int:
    return 2 * sum(case.seq_lens) * case.kv_heads * case.head_dim * case.kv_dtype.itemsize


def _prepare(bench: Bench, case: Case) -> tuple[Sets, torch.Tensor, AttentionMetadata]:
    """Enough sets of pages that none is found in the L2 cache, the queries, the batch."""
    count = 1 if bench.dry else max(1, min(8, 1 + 2 * L2_BYTES // _kv_bytes(case)))
    return [case.pages(bench.device) for _ in range(count)], case.query(bench.device), case.metadata(bench.device)


def _attend(ops: Any, case: Case, sets: Sets, query: torch.Tensor, meta: AttentionMetadata, index: int) -> torch.Tensor:
    k, v = sets[index % len(sets)]
    return ops.paged_attention(query, k, v, meta, scale=case.scale)


Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # query tokens and contexts


def _shapes(bench: Bench, lengths: list[Lengths], tiny: Lengths) -> Iterator[Case]:
    dtypes = kv_dtypes("sm_90" if bench.dry else bench.ops().arch)[:2]
    for heads, kv_heads, head_dim in ((4, 2, 64),) if bench.dry else ((28, 4, 128), (32, 8, 128)):
        for query_lens, seq_lens in [tiny] if bench.dry else lengths:
            for dtype in dtypes:
                yield Case(heads, kv_heads, head_dim, dtype, query_lens, seq_lens)


def decode(bench: Bench) -> Iterator[Row]:
    """Medians against the model of time and as a share of the copy rate."""
    sizes = ((1, 32768), (8, 8192), (64, 4096), (256, 2048), (64, 16384))
    ops, rates = bench.ops(), bench.ceilings()
    for case in _shapes(bench, [((1,) * batch, (context,) * batch) for batch, context in sizes], ((1, 1), (48, 48))):
        seconds = bench.median_s(partial(_attend, ops, case, *_prepare(bench, case)))
        work = decode_work(list(case.seq_lens), case.heads, case.kv_heads, case.head_dim, case.kv_dtype.itemsize)
        row = {"case": case.label, "kv_gb": round(_kv_bytes(case) / 1e9, 3)}
        row["predicted_us"] = round(work.seconds(rates) * 1e6, 1)
        if seconds:
            row["measured_us"] = round(seconds * 1e6, 1)
            row["percent_of_copy_rate"] = round(100 * work.num_bytes / rates.bytes_per_s / seconds, 1)
        yield row


def prefill(bench: Bench) -> Iterator[Row]:
    """Medians against the model of time and as a share of the matmul rate."""
    lengths = [((2048,), (2048,)), ((8192,), (8192,)), ((2048,), (16384,)), ((512,) * 8, (512,) * 8)]
    ops, rates = bench.ops(), bench.ceilings()
    for case in _shapes(bench, lengths, ((9, 4), (20, 30))):
        seconds = bench.median_s(partial(_attend, ops, case, *_prepare(bench, case)))
        lens = (list(case.query_lens), list(case.seq_lens))
        work = prefill_work(*lens, case.heads, case.kv_heads, case.head_dim, case.kv_dtype.itemsize)
        row = {"case": case.label, "predicted_us": round(work.seconds(rates) * 1e6, 1)}
        if seconds:
            row["measured_us"] = round(seconds * 1e6, 1)
            row["percent_of_matmul_rate"] = round(100 * work.flop / rates.flop_per_s / seconds, 1)
        yield row


def cascade(bench: Bench) -> Iterator[Row]:
    """Attention over a shared prefix, read once and read by each, beside what the rule says."""
    ops = bench.ops()
    name = "" if bench.dry else torch.cuda.get_device_name()
    sizes = ((3, 32),) if bench.dry else ((4, 1024), (8, 2048), (32, 512), (32, 2048), (64, 4096), (256, 4096))
    heads, kv_heads, head_dim = (4, 2, 64) if bench.dry else (28, 4, 128)
    for requests, shared in sizes:
        lens = (shared + (16 if bench.dry else 256),) * requests
        case = Case(heads, kv_heads, head_dim, torch.bfloat16, (1,) * requests, lens, shared=shared)
        sets, query, meta = _prepare(bench, case)
        alone = dataclasses.replace(meta, shared_prefix=None)
        together_s = bench.median_s(partial(_attend, ops, case, sets, query, meta))
        alone_s = bench.median_s(partial(_attend, ops, case, sets, query, alone))
        rule = CascadeRule(frozenset({0}), 2 * kv_heads * head_dim * 2, device_bytes_per_s(name))
        row: Row = {"case": f"{requests} requests over {shared} tokens", "rule": rule.pays(requests, shared)}
        if together_s and alone_s:
            row |= {"cascade_us": round(together_s * 1e6, 1), "each_us": round(alone_s * 1e6, 1)}
        yield row


def splits(bench: Bench) -> Iterator[Row]:
    """Decode with other numbers of splits than the table's: what to change there."""
    ops = bench.ops()
    for batch, context in ((2, 48),) if bench.dry else ((1, 32768), (8, 8192), (64, 4096), (128, 1024)):
        shape = (4, 2, 64) if bench.dry else (28, 4, 128)
        case = Case(*shape, torch.bfloat16, (1,) * batch, (context,) * batch)
        prepared = _prepare(bench, case)
        row: Row = {"case": case.label}
        for count in (None, 1, 2) if bench.dry else (None, 1, 2, 4, 8, 16, 32):
            seconds = bench.median_s(partial(_decode_in_splits, ops, case, *prepared, count))
            row["table_us" if count is None else f"{count}_us"] = seconds and round(seconds * 1e6, 1)
        yield row


def _decode_in_splits(
    ops: Any, case: Case, sets: Sets, query: torch.Tensor, meta: AttentionMetadata, count: int | None, index: int
) -> torch.Tensor:
    k, v = sets[index % len(sets)]
    return ops.paged_decode(query, k, v, meta.block_tables, meta.seq_lens, scale=case.scale, splits=count)
