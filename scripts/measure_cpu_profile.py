"""Measure this machine's CPU as `kvctl size --gpu cpu` needs it, and write profiles/hardware/cpu.yaml.

Measured with the kernels that `kvctl serve` uses here: the rate at which one row reads weights (bandwidth), the rate
of large products (TFLOP/s) and what a step costs beside both (a model too small to weigh anything). Needs the
[serve] extra; takes half a minute; run it on an idle machine.

    python scripts/measure_cpu_profile.py [--threads N] [--output FILE]
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from kvctl.core.config import SchedulerConfig
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.build import build_engine_core
from kvctl.engine.config import DeviceConfig, EngineConfig, ModelConfig
from kvctl.engine.layers.linear import select_linears

ROOT = Path(__file__).resolve().parent.parent
SIDE = 4096  # rows and columns of a weight
COPIES = 16  # 512 MiB of bfloat16: far beyond any cache
ROWS = 512  # of the large product
REPEATS, LEAST_S = 7, 6.0  # of each measurement: at least so many runs and so long
OVERHEAD_LAYERS = 32
OVERHEAD_STEPS, OVERHEAD_RUN = 800, 20


def fastest_s(run: Callable[[], object]) -> float:
    """Shortest of several runs: what the machine can do when nothing else asks for it."""
    run()
    best, runs, begun = float("inf"), 0, time.perf_counter()
    while runs < REPEATS or time.perf_counter() - begun < LEAST_S:
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
        runs += 1
    return best


def measure_linears(dtype: torch.dtype, threads: int) -> tuple[float, float, str]:
    """GB/s of one row over many weights, TFLOP/s of many rows, and the backend's name."""
    backend = select_linears("cpu", dtype, "auto", threads)
    weights = [backend.pack(torch.randn(SIDE, SIDE).to(dtype), None) for _ in range(COPIES)]
    one, many = torch.randn(1, SIDE).to(dtype), torch.randn(ROWS, SIDE).to(dtype)
    read_s = fastest_s(lambda: [weight(one) for weight in weights])
    product_s = fastest_s(lambda: weights[0](many))
    n_bytes = COPIES * SIDE * SIDE * dtype.itemsize
    return n_bytes / read_s / 1e9, 2 * ROWS * SIDE * SIDE / product_s / 1e12, backend.name


def measure_overhead(threads: int) -> float:
    """Seconds of a decode step per layer of a model that weighs nothing."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": OVERHEAD_LAYERS,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        core, _ = build_engine_core(
            EngineConfig(
                model=ModelConfig(folder, dtype="bfloat16", load_format="dummy"),
                scheduler=SchedulerConfig(max_model_len=2048, max_num_seqs=8),
                device=DeviceConfig(device="cpu", num_threads=threads, kv_cache_memory_bytes=64 << 20),
            ),
            time.monotonic,
            lambda line: None,
        )
        core.add(Request("r", [1, 2, 3], SamplingParams(max_tokens=1000, ignore_eos=True, temperature=0.0)))
        for _ in range(20):
            core.step()
        best = float("inf")
        for _ in range(OVERHEAD_STEPS // OVERHEAD_RUN):  # a step may leave its work to the next: time runs of them
            started = time.perf_counter()
            for _ in range(OVERHEAD_RUN):
                core.step()
            best = min(best, (time.perf_counter() - started) / OVERHEAD_RUN)
    return best / OVERHEAD_LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=ROOT / "profiles" / "hardware" / "cpu.yaml")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bandwidth, bf16, backend = measure_linears(torch.bfloat16, options.threads)
    fp32_bandwidth, fp32, _ = measure_linears(torch.float32, options.threads)
    overhead_s = measure_overhead(options.threads)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    today = datetime.now(UTC).date().isoformat()
    setup = f"{options.threads} threads, {backend} kernels, torch {torch.__version__}"
    how = f"scripts/measure_cpu_profile.py on {today}: {setup}"
    fields = {
        "id": "cpu",
        "name": json.dumps(f"this machine's CPU ({platform.machine()}, {options.threads} threads)"),
        "vendor": "cpu",
        "arch": "cpu",
        "compute_capability": '"cpu"',
        "aliases": "[]",
        "as_of": f'"{today}"',
        "memory_gb": f"{total / 1e9:.1f}",
        "driver_mib": "null",
        "torch_total_gib": f"{total / 2**30:.2f}",
        "bandwidth_gb_s": f"{max(bandwidth, fp32_bandwidth):.1f}",
        "dense_tflops": f"{{fp32: {fp32:.4f}, fp16: null, bf16: {bf16:.4f}, fp8: null, fp4: null, int8: null}}",
        "tdp_w": "null",
        "interconnect": "{type: none, gb_s: 0}",
        "host_link": "null",
        "usd_per_hour": "null",
        "layer_overhead_us": f"{overhead_s * 1e6:.1f}",
    }
    measured = ("torch_total_gib", "bandwidth_gb_s", "fp32", "bf16", "layer_overhead_us")
    lines = [f"{key}: {value}" for key, value in fields.items()]
    lines += ["sources:", *(f"  {name}: {json.dumps(how)}" for name in measured)]
    lines += [
        "unverified: []",
        'note: "Rates of the serving kernels, not of a datasheet. Run the script on your machine."',
    ]
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
