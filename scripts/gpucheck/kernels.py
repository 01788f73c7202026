"""Every kernel in every configuration of this architecture's table, held against float64 or plain torch.

The cases are compiled and run by several processes at once: compiling is what takes the time, and a kernel that breaks
the device takes its own process only. What they compile, the engines find in Triton's cache.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpucheck.bench import Bench
from gpucheck.cases import Case
from kvctl.engine.sampler_random import keys_tensor, token_key
from kvctl.engine.sampler_random import race as torch_race
from kvctl_kernels.metadata import KVScales
from kvctl_kernels.reference import TorchOps

Row = dict[str, Any]
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
_BF16 = torch.bfloat16


def kv_dtypes(arch: str) -> tuple[torch.dtype, ...]:
    """What pages of a bfloat16 model may hold here."""
    if arch == "gfx942":
        return (_BF16, torch.float8_e4m3fnuz)
    return (_BF16, torch.float8_e4m3fn, torch.float8_e5m2)


def attention_cases(dry: bool, arch: str) -> list[Case]:
    """Head sizes, dtypes, groups, windows, caps and cascades, each as decode and as prefill."""
    lengths = (5, 40) if dry else (1, 17, 300, 2049, 64)
    queries = [tuple(1 for _ in lengths), tuple(min(n, 9 if dry else 70) for n in lengths)]
    own = kv_dtypes(arch)
    found: list[Case] = []

    def add(heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype, **special: Any) -> None:
        found.extend(Case(heads, kv_heads, head_dim, kv_dtype, query, lengths, **special) for query in queries)

    def add_cascade(heads: int, kv_heads: int, kv_dtype: torch.dtype) -> None:
        count, shared = (3, 32) if dry else (40, 2048)
        seq_lens = tuple(shared + 1 + i % 50 for i in range(count))
        found.append(Case(heads, kv_heads, 64 if dry else 128, kv_dtype, (1,) * count, seq_lens, shared=shared))

    if dry:
        add(4, 2, 64, _BF16)
        add(4, 2, 64, own[1], window=17, soft_cap=30.0)
        add(4, 2, 64, torch.float32, dtype=torch.float32)
        add_cascade(4, 2, own[1])
        return found
    for kv_dtype in own:  # the engine's own shapes first: what is compiled here, it does not wait for
        add(28, 4, 128, kv_dtype)
        add_cascade(28, 4, kv_dtype)
        for head_dim in (64, 96, 128, 256):
            add(32, 8, head_dim, kv_dtype)
        for head_dim, soft_cap in ((128, None), (128, 30.0), (256, None)):
            add(32, 8, head_dim, kv_dtype, window=40, soft_cap=soft_cap)
        add_cascade(32, 8, kv_dtype)
    for heads, kv_heads in ((8, 8), (9, 3), (8, 1)):
        add(heads, kv_heads, 128, _BF16)
    add(32, 8, 128, torch.float16, dtype=torch.float16)
    for head_dim in (32, 64, 128, 256):
        add(8, 2, head_dim, torch.float32, dtype=torch.float32)
    return found


def check_attention(case: Case, dry: bool) -> Row:
    """Relative L2 error of one case."""
    bench = Bench(dry, 1e9, Path())
    ops = bench.ops()
    torch.manual_seed(0)
    (k, v), meta, query = case.pages(bench.device), case.metadata(bench.device), case.query(bench.device)
    got = ops.paged_attention(query, k, v, meta, scale=case.scale, window=case.window, soft_cap=case.soft_cap)
    want = case.attention64(query, k, v, meta)
    error = float((got.cpu().double() - want).norm() / want.norm())
    return {"case": case.label, "error": error, "ok": error < _TOLERANCE[case.dtype]}


def check_layer(name: str, kv_dtype: torch.dtype, dry: bool) -> Row:
    """One of the other kernels against plain torch on the CPU."""
    bench = Bench(dry, 1e9, Path())
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = (4, 4, 2, 64) if dry else (70, 28, 4, 128)
    row = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(_BF16)
    vocab, size = (3000, 96) if dry else (152064, 3584)
    slots, positions = torch.arange(16, 16 + tokens), torch.arange(tokens)
    scaled, keys = torch.randn(8, vocab) * 3, keys_tensor([token_key(i, i) for i in range(8)], torch.device("cpu"))
    scales = KVScales(torch.full((kv_heads,), 0.5), torch.full((kv_heads,), 2.0)) if kv_dtype.itemsize == 1 else None
    norms, table = (torch.rand(dim).to(_BF16), torch.rand(dim).to(_BF16), 1e-6), torch.randn(tokens, dim)
    wide, residual, weight = (torch.randn(n, size).to(_BF16) for n in (tokens, tokens, 1))

    def results(ops: Any, race: Callable[..., torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        def on(x: torch.Tensor) -> torch.Tensor:
            return x.to(device)

        parts = on(row).view(tokens, -1, dim).split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        shape, itemsize = (tokens // 16 + 2, kv_heads, 16, dim), kv_dtype.itemsize
        caches = [torch.zeros(torch.Size(shape).numel() * itemsize, dtype=torch.uint8, device=device) for _ in range(2)]
        caches = [cache.view(kv_dtype).view(shape) for cache in caches]
        own = KVScales(on(scales.key), on(scales.value)) if scales else None
        if name == "store_kv":
            ops.store_kv(parts[1], parts[2], *caches, on(slots), own)
            return caches
        if name.startswith("place"):
            after = (*parts, on(positions), on(table), *caches, on(slots), own)
            if name == "place":
                return [ops.rotary_and_store_kv(*after), *caches]
            return [ops.norm_rotary_and_store_kv(on(norms[0]), on(norms[1]), norms[2], *after), *caches]
        if name == "rotary of a part":
            return list(ops.rotary(parts[0], parts[1], on(positions), on(table[:, : dim // 2].contiguous())))
        if name == "norm":
            return [ops.rms_norm(on(wide), on(weight[0]), 1e-6)]
        if name == "residual norm":
            return list(ops.rms_norm_residual(on(wide), on(residual).clone(), on(weight[0]), 1e-6))
        if name == "race":
            return [race(on(scaled), on(keys))]
        return [ops.silu_and_mul(on(wide)) if name == "silu" else ops.gelu_tanh_and_mul(on(wide))]

    ops = bench.ops()
    from kvctl_kernels.triton_sampling import race

    got = results(ops, race, bench.device)
    want = results(TorchOps(), torch_race, torch.device("cpu"))
    error = max(
        float((x.float().cpu() - y.float()).norm() / y.float().norm().clamp_min(1e-9))
        for x, y in zip(got, want, strict=True)
    )
    return {"case": f"{name} {str(kv_dtype).removeprefix('torch.')}", "error": error, "ok": error < _TOLERANCE[_BF16]}


def _in_processes(bench: Bench, checks: list[Callable[[], Row]]) -> Iterator[Row]:
    if bench.dry:
        yield from (check() for check in checks)
        return
    context = multiprocessing.get_context("spawn")
    workers = max(1, min(12, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for future in [pool.submit(check) for check in checks]:
            try:
                yield future.result()
            except Exception as error:  # a case that breaks the device breaks its process, and is told as broken
                yield {"case": "?", "ok": False, "problem": f"{type(error).__name__}: {error}"[:300]}


def attention(bench: Bench) -> Iterator[Row]:
    """All attention cases."""
    cases = attention_cases(bench.dry, bench.ops().arch)
    yield from _in_processes(bench, [partial(check_attention, case, bench.dry) for case in cases])


def layers(bench: Bench) -> Iterator[Row]:
    """Stores, rotations, norms, gates, sampling."""
    by_pages = [("store_kv", dtype) for dtype in kv_dtypes(bench.ops().arch)]
    by_pages += [(name, dtype) for name in ("place", "place with norms") for _, dtype in by_pages]
    plain = [(name, _BF16) for name in ("rotary of a part", "norm", "residual norm", "silu", "gelu", "race")]
    yield from _in_processes(bench, [partial(check_layer, *each, bench.dry) for each in by_pages + plain])
