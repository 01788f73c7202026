#!/usr/bin/env python3
"""Check and measure the whole GPU path on a real card, in six minutes; results are written after each part.

    scripts/gpu_check.py --out DIR             on a GPU box (torch, triton, numpy, transformers; no server packages)
    scripts/gpu_check.py --out DIR --dry-run   anywhere: tiny shapes in Triton's interpreter, no timing

DIR/gpu_check.json grows part by part, so that a run that is cut still tells something.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
# Before anything imports triton: it reads the switch at import.
os.environ["TRITON_INTERPRET"] = "1" if "--dry-run" in sys.argv else "0"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import torch

from kvctl.core.config import SchedulerConfig
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.build import build_engine_core
from kvctl.engine.cascade import CascadeRule
from kvctl.engine.config import DeviceConfig, EngineConfig, ModelConfig
from kvctl.sizing.kernel_time import Ceilings, decode_work, prefill_work
from kvctl_kernels.metadata import AttentionMetadata

BUDGET_S = 360.0
L2_BYTES = 64 << 20  # sets of K/V are rotated so that none is found in the cache
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
TINY = QWEN_7B | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "rope_theta": 1e4,
}  # fmt: skip


class Report:
    """Results by part, on disk after each one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu_check.json"
        self.parts: dict[str, Any] = {}
        self._started = time.monotonic()

    def run(self, name: str, part: Callable[[], Any]) -> None:
        """Run one part and write what it returns, or how it broke."""
        started = time.monotonic()
        try:
            result = part()
        except Exception as error:  # one broken part must not take the others with it; it is reported as broken
            traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {error}"}
        self.parts[name] = {"result": result, "seconds": round(time.monotonic() - started, 2)}
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps(self.parts, indent=1))
        whole.replace(self._path)
        print(f"[{time.monotonic() - self._started:6.1f} s] {name}: {json.dumps(result)[:600]}", flush=True)

    @property
    def has_errors(self) -> bool:
        """Whether any part broke."""
        return any(isinstance(p["result"], dict) and "error" in p["result"] for p in self.parts.values())


class Bench:
    """Shapes, device and clock of one run: a GPU, or the interpreter at a tiny scale."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.ceilings = Ceilings(1.0, 1.0)
        self._started_s = time.monotonic()

    def is_late(self, share: float) -> bool:
        """Whether this share of the six minutes is over: what is left out then is said in the results."""
        return time.monotonic() - self._started_s > share * BUDGET_S

    def ops(self) -> Any:
        """The Triton kernels for this device."""
        from kvctl_kernels.triton_ops import TritonOps

        if self.dry:
            return TritonOps(self.device, arch="sm_90", num_multiprocessors=4)
        return TritonOps(self.device)

    def median_s(self, run: Callable[[int], Any], repeats: int = 20) -> float | None:
        """Median time of `run(i)`, device events, after warm-up. None: not measured (dry run)."""
        run(0)
        if self.dry:
            return None
        for index in range(3):
            run(index)
        pairs = []
        for index in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(index)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2] / 1e3


# ---- (a) the machine ----


def environment(bench: Bench) -> dict[str, Any]:
    import triton

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    if not bench.dry:
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "sm": properties.multi_processor_count, "memory": properties.total_memory}
        found["capability"] = list(torch.cuda.get_device_capability())
        found["arch"] = bench.ops().arch
    return found


def ceilings(bench: Bench) -> dict[str, Any]:
    """Copy rate (read plus write) and bf16 matmul rate."""
    count = 1 << 10 if bench.dry else 1 << 30
    source = torch.ones(count, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.median_s(lambda _: target.copy_(source))
    size = 64 if bench.dry else 8192
    a = torch.randn(size, size, device=bench.device).bfloat16()
    matmul_s = bench.median_s(lambda _: a @ a)
    if copy_s and matmul_s:
        bench.ceilings = Ceilings(2 * count / copy_s, 2 * size**3 / matmul_s)
    return dataclasses.asdict(bench.ceilings)


# ---- (b) kernels against float64, (c) their speed ----


@dataclasses.dataclass
class Case:
    """Attention of one batch: heads, pages and lengths."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype
    query_lens: list[int]
    seq_lens: list[int]
    page: int = 16

    @property
    def label(self) -> str:
        """Kind, heads, dtype of the pages, requests x context."""
        kind = "decode" if max(self.query_lens) == 1 else "prefill"
        dtype = str(self.kv_dtype).removeprefix("torch.")
        return f"{kind} {self.heads}/{self.kv_heads}x{self.head_dim} {dtype} {len(self.seq_lens)}x{self.seq_lens[0]}"

    def tables(self, device: torch.device, num_blocks: int) -> torch.Tensor:
        """Block tables over shuffled pages."""
        counts = [-(-length // self.page) for length in self.seq_lens]
        order = (torch.randperm(num_blocks - 1)[: sum(counts)] + 1).to(torch.int32)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, (part, count) in enumerate(zip(order.split(counts), counts, strict=True)):
            table[row, :count] = part
        return table.to(device)

    def pages(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Random pages of K and of V."""
        num_blocks = sum(-(-length // self.page) for length in self.seq_lens) + 1
        shape = (num_blocks, self.kv_heads, self.page, self.head_dim)
        return torch.randn(shape, device=device).to(self.kv_dtype), torch.randn(shape, device=device).to(self.kv_dtype)

    def metadata(self, device: torch.device, num_blocks: int) -> AttentionMetadata:
        """What the kernels are told of the batch."""
        table = self.tables(device, num_blocks)
        rows = [row[: -(-length // self.page)] for row, length in zip(table.tolist(), self.seq_lens, strict=True)]
        return AttentionMetadata.from_lists(rows, self.query_lens, self.seq_lens, self.page, device)


def attention64(case: Case, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: Any) -> torch.Tensor:
    """Textbook attention in float64 on the host."""
    outputs, token = [], 0
    for row, (query_len, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        blocks = meta.block_tables[row, : -(-length // case.page)].long()
        gathered = [
            x[blocks].float().cpu().double().permute(1, 0, 2, 3).reshape(case.kv_heads, -1, case.head_dim)[:, :length]
            for x in (k, v)
        ]
        key, value = (x.repeat_interleave(case.heads // case.kv_heads, dim=0) for x in gathered)
        rows = query[token : token + query_len].cpu().double().transpose(0, 1)
        scores = rows @ key.transpose(1, 2) * case.head_dim**-0.5
        own = torch.arange(length - query_len, length)[:, None]
        scores = scores.masked_fill(torch.arange(length)[None, :] > own, float("-inf"))
        outputs.append((scores.softmax(-1) @ value).transpose(0, 1))
        token += query_len
    return torch.cat(outputs)


def kv_dtypes() -> Iterator[torch.dtype]:
    yield from (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def correctness(bench: Bench) -> dict[str, Any]:
    """Every configuration of this architecture's table against float64: relative L2 error."""
    if bench.dry:
        from tests.support.triton_interpreter import repair

        repair()
    ops, worst, wrong, count = bench.ops(), 0.0, [], 0
    lengths = [5, 40] if bench.dry else [1, 17, 300, 2049, 64]
    for head_dim in (64, 128) if bench.dry else (64, 96, 128, 256):
        for kv_dtype in kv_dtypes():
            # Each kernel takes seconds to compile: every group size for one row of the table, the usual one elsewhere.
            groups = (
                ((8, 8), (9, 3), (28, 4), (32, 8), (8, 1)) if kv_dtype == torch.bfloat16 and head_dim == 128 else ()
            )
            for heads, kv_heads in ((4, 2),) if bench.dry else groups or ((32, 8),):
                if bench.is_late(0.4):
                    break
                for query_lens in ([1] * len(lengths), [min(n, 70) for n in lengths]):
                    case = Case(heads, kv_heads, head_dim, kv_dtype, query_lens, lengths)
                    k, v = case.pages(bench.device)
                    meta = case.metadata(bench.device, k.shape[0])
                    query = torch.randn(sum(query_lens), heads, head_dim, device=bench.device).bfloat16()
                    got = ops.paged_attention(query, k, v, meta, scale=head_dim**-0.5).cpu().double()
                    want = attention64(case, query, k, v, meta)
                    error = float((got - want).norm() / want.norm())
                    worst, count = max(worst, error), count + 1
                    if not error < 1e-2:
                        wrong.append({"case": case.label, "error": error})
    if wrong:
        raise AssertionError(f"{len(wrong)} configurations are wrong: {wrong[:5]}")
    return {"cases": count, "worst_relative_error": worst, "cut": bench.is_late(0.4)}


def attend(
    ops: Any, sets: list[tuple[torch.Tensor, torch.Tensor]], query: torch.Tensor, meta: AttentionMetadata, index: int
) -> torch.Tensor:
    """Attention over one of the sets of pages."""
    k, v = sets[index % len(sets)]
    return ops.paged_attention(query, k, v, meta, scale=query.shape[2] ** -0.5)


def speed(bench: Bench) -> list[dict[str, Any]]:
    """Medians against the model of time; decode also as a share of the copy rate, prefill of the matmul rate."""
    ops, rows = bench.ops(), []
    shapes = [([1] * 2, [48] * 2)] if bench.dry else [
        ([1] * batch, [context] * batch)
        for batch, context in ((1, 32768), (8, 8192), (64, 4096), (256, 2048), (64, 16384))
    ] + [([2048], [2048]), ([8192], [8192]), ([2048], [16384]), ([512] * 8, [512] * 8)]  # fmt: skip
    for heads, kv_heads, head_dim in ((4, 2, 64),) if bench.dry else ((32, 8, 128), (28, 4, 128)):
        for query_lens, seq_lens in shapes:
            for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
                if bench.is_late(0.6):
                    return [*rows, {"case": "cut: out of time"}]
                case = Case(heads, kv_heads, head_dim, kv_dtype, query_lens, seq_lens)
                size = 2 * sum(seq_lens) * kv_heads * head_dim * kv_dtype.itemsize
                sets = [case.pages(bench.device) for _ in range(max(1, min(8, 1 + L2_BYTES * 2 // size)))]
                meta = case.metadata(bench.device, sets[0][0].shape[0])
                query = torch.randn(sum(query_lens), heads, head_dim, device=bench.device).bfloat16()
                seconds = bench.median_s(partial(attend, ops, sets, query, meta))
                decode = max(query_lens) == 1
                if decode:
                    work = decode_work(seq_lens, heads, kv_heads, head_dim, kv_dtype.itemsize)
                else:
                    work = prefill_work(query_lens, seq_lens, heads, kv_heads, head_dim, kv_dtype.itemsize)
                row = {"case": case.label, "predicted_us": round(work.seconds(bench.ceilings) * 1e6, 1)}
                if seconds:
                    row["measured_us"] = round(seconds * 1e6, 1)
                    rate = (
                        work.num_bytes / bench.ceilings.bytes_per_s if decode else work.flop / bench.ceilings.flop_per_s
                    )
                    row["percent_of_copy_rate" if decode else "percent_of_matmul_rate"] = round(100 * rate / seconds, 1)
                rows.append(row)
                del sets
    return rows


# ---- (d) graphs, (e) the engine ----


def build(bench: Bench, shape: dict[str, Any], **changes: Any) -> tuple[Any, Any, list[str]]:
    """A core on random weights of this shape, what it found out, and its log."""
    small = bench.dry or shape is TINY
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    device = DeviceConfig(
        device="cpu" if bench.dry else "cuda",
        num_gpu_blocks_override=200 if small else None,
        enforce_eager=changes.pop("enforce_eager", False),
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),
        cpu_kernels="torch",
    )
    seqs = 8 if small else 256
    config = EngineConfig(
        model=ModelConfig(folder=str(folder), load_format="dummy", dtype="float32" if shape is TINY else "auto"),
        scheduler=SchedulerConfig(
            max_model_len=512 if small else 8192, max_num_seqs=seqs, max_num_batched_tokens=512 if small else 8192
        ),
        device=device,
        **changes,
    )
    lines: list[str] = []
    core, info = build_engine_core(config, time.monotonic, lines.append)
    return core, info, lines


def generate(
    core: Any, prompts: list[list[int]], max_tokens: int, name: str = "r"
) -> tuple[dict[str, list[int]], float]:
    """Greedy tokens per request and the seconds it took."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(Request(f"{name}{index}", prompt, params))
    tokens: dict[str, list[int]] = {f"{name}{index}": [] for index in range(len(prompts))}
    started = time.monotonic()
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens, time.monotonic() - started


def prompts_of(count: int, length: int, vocab: int, shared: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    head = torch.randint(3, vocab, (shared,), generator=generator).tolist()
    return [head + torch.randint(3, vocab, (length - shared,), generator=generator).tolist() for _ in range(count)]


def tiny_engine(bench: Bench) -> dict[str, Any]:
    """A tiny random model in float32: the same greedy tokens eager and captured, synchronous and overlapped, and as
    the CPU gives (on a GPU, where rounding differs, at least 95 % of them)."""
    prompts = prompts_of(6, 40, 512) + prompts_of(3, 90, 512, shared=64)
    runs = {}
    for name, changes in {
        "eager": {"enforce_eager": True, "async_scheduling": False},
        "graphs": {"async_scheduling": False},
        "graphs, overlapped": {},
    }.items():
        core, _, _ = build(bench, TINY, **changes)
        runs[name], _ = generate(core, prompts, 24)
        core.close()
    core, _, _ = build(Bench(dry=True), TINY)
    reference, _ = generate(core, prompts, 24)
    core.close()
    if not runs["eager"] == runs["graphs"] == runs["graphs, overlapped"]:
        raise AssertionError("eager, captured and overlapped steps differ")
    pairs = [(a, b) for key in reference for a, b in zip(reference[key], runs["eager"][key], strict=True)]
    agreement = sum(a == b for a, b in pairs) / len(pairs)
    if agreement < 0.95:
        raise AssertionError(f"only {agreement:.1%} of the tokens agree with the CPU")
    return {"agreement_with_cpu": agreement, "tokens": len(pairs)}


def big_engine(bench: Bench) -> list[dict[str, Any]]:
    """A model of Qwen2.5-7B's shape with random weights: tokens/s and KV tokens, by what is switched on."""
    shape = TINY if bench.dry else QWEN_7B
    vocabulary = shape["vocab_size"]
    length, output = (32, 4) if bench.dry else (512, 128)
    rows = []
    for label, changes in {
        "graphs": {},
        "eager": {"enforce_eager": True},
        "fp8 KV": {"kv_cache_dtype": "fp8"},
    }.items():
        if bench.is_late(0.85):
            return [*rows, {"run": f"cut before {label}: out of time"}]
        core, info, lines = build(bench, shape, **changes)
        generate(core, prompts_of(2, 32, vocabulary), 4, "warm")
        for count in (1, 2) if bench.dry else (1, 8, 64, 256) if label == "graphs" else (1, 64):
            tokens, seconds = generate(core, prompts_of(count, length, vocabulary), output, f"{label}{count}-")
            made = sum(map(len, tokens.values()))
            rows.append({"run": label, "concurrency": count, "output_tokens_per_s": round(made / seconds, 1)})
        if label == "graphs":
            rows += shared_prefix(bench, core, vocabulary)
            rows.append(step_time(bench, core, vocabulary))
        rows.append({"run": label, "kv_tokens": info.kv_tokens, "predicted": predicted_kv_tokens(shape, changes)})
        rows[-1]["log"] = lines
        core.close()
        del core
        if not bench.dry:
            torch.cuda.empty_cache()
    return rows


def shared_prefix(bench: Bench, core: Any, vocabulary: int) -> list[dict[str, Any]]:
    """Requests over one long cached prefix, the cascade allowed and not."""
    count, shared, output = (3, 64, 4) if bench.dry else (64, 4096, 64)
    rows = []
    for is_allowed in (True, False):
        prompts = prompts_of(count, shared + 32, vocabulary, shared=shared)
        with patch.object(CascadeRule, "pays", CascadeRule.pays if is_allowed else lambda *_: False):
            generate(core, prompts, 1, f"prefix{is_allowed}")  # all prompts are in the cache then: decode alone is left
            tokens, seconds = generate(core, prompts, output, f"cascade{is_allowed}")
        rate = sum(map(len, tokens.values())) / seconds
        name = f"shared {shared}-token prefix, cascade {'allowed' if is_allowed else 'off'}"
        rows.append({"run": name, "concurrency": count, "output_tokens_per_s": round(rate, 1)})
    return rows


def step_time(bench: Bench, core: Any, vocabulary: int) -> dict[str, Any]:
    """Wall time of a decode step of 64 requests over the sum of its kernels' times; the target is 1.2."""
    count, steps = (2, 3) if bench.dry else (64, 24)
    params = SamplingParams(temperature=0, max_tokens=steps + 8, ignore_eos=True)
    for index, prompt in enumerate(prompts_of(count, 48, vocabulary)):
        core.add(Request(f"step{index}", prompt, params))
    for _ in range(4):
        core.step()
    started = time.monotonic()
    for _ in range(steps // 2):
        core.step()
    wall_s = (time.monotonic() - started) / (steps // 2)
    row: dict[str, Any] = {"run": "decode step", "concurrency": count, "step_ms": round(wall_s * 1e3, 3)}
    if not bench.dry:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps // 3):
                core.step()
            torch.cuda.synchronize()
        busy_s = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / (steps // 3)
        row |= {"kernels_ms": round(busy_s * 1e3, 3), "overhead": round(wall_s / busy_s, 3)}
    while core.has_work():
        core.step()
    return row


def predicted_kv_tokens(shape: dict[str, Any], changes: dict[str, Any]) -> int | str:
    """What `kvctl size` says of this GPU; a line of text where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        command = [sys.executable, "-m", "kvctl", "size", folder, "--gpu", "h200-sxm" if "H200" in name else "auto",
                   "--json", "--max-model-len", "8192", "--max-num-seqs", "256", "--max-num-batched-tokens", "8192",
                   "--uncalibrated",
                   "--kv-cache-dtype", changes.get("kv_cache_dtype", "auto")]  # fmt: skip
        if changes.get("enforce_eager"):
            command.append("--enforce-eager")
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | {"PYTHONPATH": path}
        )
    try:
        return int(json.loads(done.stdout)["capacity"]["kv_tokens"])
    except (ValueError, KeyError, TypeError):
        return f"none: {done.stderr.strip()[-200:]}"


# ---- (f) memory checker ----


def sanitizer(bench: Bench) -> dict[str, Any]:
    """compute-sanitizer memcheck over one small decode and prefill, where the tool is there."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if bench.dry or tool is None:
        return {"skipped": "no compute-sanitizer here"}
    code = (
        f"import sys; sys.argv=['x']; sys.path[:0]={[str(ROOT / 'scripts'), *sys.path[:2]]!r}\n"
        "import gpu_check as g, torch; b=g.Bench(False); o=b.ops()\n"
        "for q in ([1,1],[9,20]):\n"
        "    c=g.Case(8,2,64,torch.bfloat16,q,[33,70]); k,v=c.pages(b.device)\n"
        "    x=torch.randn(sum(q),8,64,device='cuda').bfloat16()\n"
        "    o.paged_attention(x,k,v,c.metadata(b.device,k.shape[0]),scale=.1)\n"
        "torch.cuda.synchronize()"
    )
    done = subprocess.run([tool, sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=False)
    return {"exit": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print(
            "gpu_check: no CUDA device here\n           --dry-run checks the script itself on the CPU.", file=sys.stderr
        )
        return 1
    bench, report = Bench(args.dry_run), Report(args.out)
    for part in (environment, ceilings, correctness, tiny_engine, speed, big_engine, sanitizer):
        report.run(part.__name__, lambda part=part: part(bench))
    return 1 if report.has_errors else 0


if __name__ == "__main__":
    sys.exit(main())
