#!/usr/bin/env python3
"""The native CPU kernels against torch and oneDNN, with what memory and arithmetic gave in the same minute.

    scripts/bench_cpu_kernels.py [--threads N] [--quick]

Prints the smallest of several interleaved runs: on a shared machine the only figure that repeats. Ratios of one run
compare; absolute figures of different runs do not, memory bandwidth alone swings by two between hours.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.layers.linear import LinearBackend, OneDnnLinears, TorchLinears, _has_onednn, select_linears
from kvctl.engine.ops import Ops, TorchOps, select_ops
from kvctl.engine.sampler import Sampler, SamplingBatch, SamplingKernels, TorchSampling, select_sampling
from kvctl_kernels.cpu_build import load_native
from kvctl_kernels.metadata import AttentionMetadata

BF16 = torch.bfloat16
# The demo model, SmolLM2-135M: (inputs, outputs, how many of them).
LINEARS = ((576, 960, 30), (576, 576, 30), (576, 3072, 30), (1536, 576, 30), (576, 49152, 1))
READ_BYTES = 1 << 28


def fastest_s(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Run all in turn, `repeats` times; the smallest wall time of each, in seconds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):  # the first warms up, and may count too if it was the fastest
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def machine(threads: int, repeats: int) -> tuple[float, float]:
    """(GB/s of reads, GFLOP/s of bfloat16) as torch and oneDNN reach them now."""
    data = torch.zeros(READ_BYTES // 8, dtype=torch.int64)
    a, b = torch.randn(1024, 1024).to(BF16), torch.randn(1024, 1024).to(BF16)
    torch.set_num_threads(threads)
    best = fastest_s({"read": lambda: data.max(), "matmul": lambda: a @ b}, repeats)
    return READ_BYTES / best["read"] / 1e9, 2 * 1024**3 / best["matmul"] / 1e9


def linears(console: Console, threads: int, repeats: int, quick: bool) -> None:
    """All linears of the demo model in a row, by number of rows."""
    backends: dict[str, LinearBackend] = {"native": select_linears("cpu", BF16, "native", threads)}
    if _has_onednn():
        backends["onednn"] = OneDnnLinears()
    backends["torch"] = TorchLinears()
    weights = [[(torch.randn(n, k) * 0.02).to(BF16) for _ in range(count)] for k, n, count in LINEARS]
    packed = {
        name: [[backend.pack(weight, None) for weight in same] for same in weights]
        for name, backend in backends.items()
    }
    weight_bytes = sum(2 * k * n * count for k, n, count in LINEARS)
    table = Table(title=f"121 linears of SmolLM2-135M, bfloat16, {weight_bytes / 1e6:.0f} MB of weights", min_width=78)
    for heading in ("rows", *(f"{name} ms" for name in backends), "GB/s", "GFLOP/s", "vs best other"):
        table.add_column(heading, justify="right")
    for rows in (1, 8, 64) if quick else (1, 2, 4, 8, 12, 16, 32, 64, 128, 256):
        inputs = [torch.randn(rows, k).to(BF16) for k, _, _ in LINEARS]

        def all_of(name: str, inputs: list[Tensor] = inputs) -> Callable[[], object]:
            return lambda: [linear(x) for x, same in zip(inputs, packed[name], strict=True) for linear in same]

        best = fastest_s({name: all_of(name) for name in backends}, repeats if rows < 64 else max(2, repeats // 3))
        native = best["native"]
        others = min(value for name, value in best.items() if name != "native")
        table.add_row(
            str(rows),
            *(f"{value * 1e3:.2f}" for value in best.values()),
            f"{weight_bytes / native / 1e9:.1f}",
            f"{weight_bytes * rows / native / 1e9:.0f}",
            f"{others / native:.2f}x",
        )
    console.print(table)


def attention(console: Console, threads: int, repeats: int, quick: bool) -> None:
    """Paged attention over shuffled blocks of 16 tokens, several layers in turn so that no cache holds them."""
    both: dict[str, Ops] = {"native": select_ops("cpu", BF16, "native", threads), "torch": TorchOps()}
    table = Table(title="Paged attention, bfloat16, blocks of 16 tokens, shuffled", min_width=78)
    for heading in ("heads", "queries", "context", "native ms", "torch ms", "ratio", "KV GB/s", "GFLOP/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    cases = [(9, 3, 64, 1, 1, 512), (9, 3, 64, 64, 1, 320), (9, 3, 64, 1, 256, 256)]
    if not quick:
        cases += [(9, 3, 64, 8, 1, 2048), (32, 8, 128, 16, 1, 1024)]
        cases += [(9, 3, 64, 1, 512, 1024), (32, 8, 128, 1, 256, 1024)]
    for num_heads, num_kv_heads, head_dim, requests, query_len, context in cases:
        per_request = -(-context // 16)
        blocks = (torch.randperm(requests * per_request) + 1).view(requests, per_request).tolist()
        meta = AttentionMetadata.from_lists(blocks, [query_len] * requests, [context] * requests, 16)
        shape = (requests * per_request + 1, num_kv_heads, 16, head_dim)
        layers = [(torch.randn(shape).to(BF16), torch.randn(shape).to(BF16)) for _ in range(4)]
        query = torch.randn(requests * query_len, num_heads, head_dim).to(BF16)

        def all_layers(
            ops: Ops,
            layers: list[tuple[Tensor, Tensor]] = layers,
            query: Tensor = query,
            meta: AttentionMetadata = meta,
        ) -> Callable[[], object]:
            return lambda: [ops.paged_attention(query, k, v, meta, scale=0.125) for k, v in layers]

        best = fastest_s({name: all_layers(ops) for name, ops in both.items()}, repeats)
        one_s = best["native"] / len(layers)
        pairs = requests * (query_len * context - query_len * (query_len - 1) / 2)
        table.add_row(
            f"{num_heads}/{num_kv_heads}x{head_dim}",
            f"{requests}x{query_len}",
            str(context),
            f"{one_s * 1e3:.3f}",
            f"{best['torch'] / len(layers) * 1e3:.3f}",
            f"{best['torch'] / best['native']:.1f}x",
            f"{requests * context * num_kv_heads * head_dim * 4 / one_s / 1e9:.1f}",
            f"{4 * num_heads * head_dim * pairs / one_s / 1e9:.0f}",
        )
    console.print(table)


def sample_call(kernels: SamplingKernels, params: SamplingParams, logits: Tensor) -> Callable[[], object]:
    """Sampling all rows of logits, each by a request with a history of 300 tokens."""
    sampler = Sampler(logits.shape[1], kernels=kernels)
    batch = SamplingBatch([sampler.new_row(params, list(range(300)), 256, (2,)) for _ in range(len(logits))])
    return lambda: sampler.sample(logits, batch)


def sampling(console: Console, threads: int, repeats: int) -> None:
    """Choosing tokens from a vocabulary of 49,152; logits peaked about as a language model's are."""
    table = Table(title="Sampling, 64 rows of 49,152 bfloat16 logits", min_width=78)
    for heading in ("what", "native ms", "torch ms", "ratio"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    logits = (torch.distributions.Exponential(0.6).sample((64, 49152)) - 5).to(BF16)
    kinds: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0},
        "temperature 1": {},
        "top_p 0.9": {"top_p": 0.9},
        "top_k 40": {"top_k": 40},
        "top_p 0.9, repetition 1.1": {"top_p": 0.9, "repetition_penalty": 1.1},
    }
    for name, settings in kinds.items():
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        calls = {
            "native": sample_call(select_sampling("cpu", "native", threads), params, logits),
            "torch": sample_call(TorchSampling(), params, logits),
        }
        best = fastest_s(calls, max(2, repeats // 4))
        table.add_row(
            name, *(f"{best[k] * 1e3:.2f}" for k in ("native", "torch")), f"{best['torch'] / best['native']:.1f}x"
        )
    console.print(table)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads for all of them")
    parser.add_argument("--quick", action="store_true", help="fewer cases and runs")
    options = parser.parse_args()
    repeats = 4 if options.quick else 12
    torch.manual_seed(0)
    console = Console()
    read_gb_s, gflop_s = machine(options.threads, repeats)
    built_for = load_native().kvctl_describe().decode()
    console.print(
        f"{options.threads} threads, kernels built for {built_for}; in this minute torch reads {read_gb_s:.1f} GB/s, "
        f"its 1024^3 bfloat16 product runs at {gflop_s:.0f} GFLOP/s"
    )
    with torch.inference_mode():
        linears(console, options.threads, repeats, options.quick)
        attention(console, options.threads, repeats, options.quick)
        sampling(console, options.threads, repeats)


if __name__ == "__main__":
    main()
