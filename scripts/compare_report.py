"""What scripts/compare_engines.py measures, what a machine could do at most, and the tables of both.

Knows no engine: results come with a name.
"""

import datetime
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from bench_cpu_kernels import fastest_s

from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.models.weight_layout import all_tensors, embedding_tensor

KV_CACHE_GIB = 2


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` requests; `num_requests` in all."""

    name: str
    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0  # in front of the input tokens


SHARED_PREFIX = Load("shared prefix", 32, 32, 64, 16, shared_prefix_tokens=1024)


@dataclass(slots=True)
class Result:
    """Of one engine; `output_rates`, `ttft_ms` and `tpot_ms`: p50 of each run, by load."""

    engine: str
    ready_s: float = 0.0
    rss_bytes: int = 0
    output_rates: dict[str, list[float]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)
    tpot_ms: dict[str, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Machine:
    """The best seen in this run."""

    read_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0

    def measure(self) -> None:
        """Reads of 512 MiB and products of 2048 x 2048 in bfloat16, with all cores."""
        torch.set_num_threads(os.cpu_count() or 1)
        data = torch.from_numpy(np.zeros(1 << 26, dtype=np.int64))
        a, b = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 2048).bfloat16()
        best = fastest_s({"read": data.max, "matmul": lambda: a @ b}, 5)
        self.read_bytes_per_s = max(self.read_bytes_per_s, data.nbytes / best["read"])
        self.flops_per_s = max(self.flops_per_s, 2 * 2048**3 / best["matmul"])


@dataclass(frozen=True, slots=True)
class Work:
    """What the model needs for a token."""

    weight_bytes: int
    layer_params: int  # without the output matrix, which a prompt needs once
    head_params: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, folder: Path) -> "Work":
        """Of a bfloat16 model."""
        config = parse_decoder_config(json.loads((folder / "config.json").read_text()))
        params = sum(tensor.num_elements for tensor in all_tensors(config))
        table = embedding_tensor(config).num_elements
        layers = params - table * (1 if config.tie_word_embeddings else 2)
        return cls(2 * (layers + table), layers, table, 4 * config.num_layers * config.kv_size)

    def prompt_s(self, load: Load, machine: Machine) -> float:
        """The products of one prompt."""
        return 2 * (self.layer_params * load.input_tokens + self.head_params) / machine.flops_per_s

    def bound(self, load: Load, machine: Machine) -> float:
        """Output tokens/s if memory and arithmetic were used fully.

        A step reads the weights once or multiplies for all its tokens, whichever takes longer, and reads the keys and
        values; a prompt multiplies. Everything else is free.
        """
        rows = load.concurrency
        context = load.input_tokens + load.output_tokens / 2
        product_s = 2 * (self.layer_params + self.head_params) * rows / machine.flops_per_s
        read_s = self.weight_bytes / machine.read_bytes_per_s
        step_s = max(product_s, read_s) + rows * context * self.kv_bytes_per_token / machine.read_bytes_per_s
        return load.output_tokens / (self.prompt_s(load, machine) + load.output_tokens * step_s / rows)


def best_of(peers: list[Result], loads: tuple[Load, ...]) -> dict[str, float]:
    """By load, the highest median rate."""
    return {load.name: max(statistics.median(peer.output_rates[load.name]) for peer in peers) for load in loads}


def soonest_of(peers: list[Result], loads: tuple[Load, ...]) -> dict[str, float]:
    """By load, the lowest median time to first token."""
    return {load.name: min(statistics.median(peer.ttft_ms[load.name]) for peer in peers) for load in loads}


def ratios(name: str, ours: dict[str, list[float]], theirs: dict[str, float]) -> str:
    """A row of the table."""
    return f"| {name} | " + " | ".join(f"{statistics.median(ours[load]) / theirs[load]:.2f}x" for load in theirs) + " |"


def own_figures(own: Result, one: Load, work: Work, machine: Machine) -> str:
    """What one request at a time takes against what the machine needs for it, and memory beside the KV cache.

    All of the KV cache has been used by then: the loads hold more tokens than it has.
    """
    ttft_ms, tpot_ms = statistics.median(own.ttft_ms[one.name]), statistics.median(own.tpot_ms[one.name])
    prompt_ms = work.prompt_s(one, machine) * 1000
    read_ms = work.weight_bytes / machine.read_bytes_per_s * 1000
    beside = own.rss_bytes - (KV_CACHE_GIB << 30)
    return (
        f"{own.engine}, one request: first token after {ttft_ms:.0f} ms, {ttft_ms / prompt_ms:.2f} times what its "
        f"products take at the machine's rate ({prompt_ms:.0f} ms); {tpot_ms:.1f} ms a token, {tpot_ms / read_ms:.2f} "
        f"times what reading the weights takes ({read_ms:.1f} ms). Memory beside the {KV_CACHE_GIB} GiB of KV cache, "
        f"all processes: {beside / 1e9:.2f} GB."
    )


def report(
    results: list[Result],
    not_run: dict[str, str],
    loads: tuple[Load, ...],
    work: Work,
    machine: Machine,
    runs: int,
    prefix_ms: tuple[float, float] | None,
) -> str:
    """The tables as markdown."""
    cores = os.cpu_count()
    lines = [
        f"Measured {datetime.date.today().isoformat()} on {cores} cores, median (smallest to largest) of {runs} runs; "
        f"in the same run the machine read {machine.read_bytes_per_s / 1e9:.0f} GB/s and multiplied "
        f"{machine.flops_per_s / 1e9:.0f} GFLOP/s in bfloat16. The percentages are of the bound these two give.",
        "",
        "| output tokens/s | " + " | ".join(load.name for load in loads) + " | ready s | memory GB |",
        "| --- |" + " ---: |" * (len(loads) + 2),
    ]
    for result in results:
        cells = []
        for load in loads:
            rates = result.output_rates[load.name]
            median = statistics.median(rates)
            share = median / work.bound(load, machine)
            cells.append(f"{median:.0f} ({min(rates):.0f} to {max(rates):.0f}), {share:.0%}")
        memory = result.rss_bytes / 1e9
        lines.append(f"| {result.engine} | " + " | ".join(cells) + f" | {result.ready_s:.1f} | {memory:.2f} |")
    lines.append("| bound | " + " | ".join(f"{work.bound(load, machine):.0f}" for load in loads) + " | | |")
    served = [result for result in results if result.ttft_ms]
    lines += ["", "| time to first token, p50 ms | " + " | ".join(load.name for load in loads) + " |"]
    lines.append("| --- |" + " ---: |" * len(loads))
    for result in served:
        cells = [f"{statistics.median(result.ttft_ms[load.name]):.0f}" for load in loads]
        lines.append(f"| {result.engine} | " + " | ".join(cells) + " |")
    ours = [result for result in results if result.engine.startswith("kvctl")]
    peers = [result for result in results if not result.engine.startswith("kvctl")]
    if ours and peers:
        lines += ["", "| ours over the best peer | " + " | ".join(load.name for load in loads) + " |"]
        lines.append("| --- |" + " ---: |" * len(loads))
        lines += [ratios(f"{one.engine}, output tokens/s", one.output_rates, best_of(peers, loads)) for one in ours]
        timed = [peer for peer in peers if peer.ttft_ms]
        if timed and ours[0].ttft_ms:
            lines.append(ratios(f"{ours[0].engine}, time to first token", ours[0].ttft_ms, soonest_of(timed, loads)))
    if ours and ours[0].ttft_ms:
        lines += ["", own_figures(ours[0], loads[0], work, machine)]
    if prefix_ms is not None:
        cached, plain = prefix_ms
        lines += [
            "",
            f"{SHARED_PREFIX.num_requests} requests at once with the same first {SHARED_PREFIX.shared_prefix_tokens:,} "
            f"tokens: time to first token {cached:,.0f} ms with prefix caching, {plain:,.0f} ms without: "
            f"{plain / cached:.1f}x.",
        ]
    if not_run:
        lines += ["", "Not run: " + "; ".join(f"{name} ({why})" for name, why in not_run.items()) + "."]
    return "\n".join(lines)
