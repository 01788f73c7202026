#!/usr/bin/env python3
"""Ours beside the other CPU engines that are installed here: one after another, the same load, the same bounds.

    scripts/compare_engines.py [--runs 3] [--quick] [--only kvctl,vllm] [--write-readme]

Each engine is started, waited for, warmed and loaded by `kvctl bench` through HTTP, then stopped. OpenVINO GenAI has no
server of its own and is driven in process (scripts/in_process_load.py); ours is measured both ways, so that like stands
beside like. Between the engines the machine's read bandwidth and bfloat16 matmul rate are measured; the percent of the
bound come from their best values in this run. Run it on an otherwise idle machine.

Where the peers are (a peer without one is named as not run):
    KVCTL_PEER_VLLM        folder of a virtual environment, default ~/.cache/kvctl/peers/vllm
    KVCTL_PEER_OPENVINO    the same, default ~/.cache/kvctl/peers/openvino
    KVCTL_PEER_OV_MODEL    the exported model, default ~/.cache/kvctl/peers/ov-model
    KVCTL_PEER_LLAMACPP    the llama-server program, default ~/.cache/kvctl/peers/llama-server
    KVCTL_PEER_GGUF        its bfloat16 model, default ~/.cache/kvctl/peers/model.gguf
"""

import argparse
import datetime
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import torch
from bench_cpu_kernels import fastest_s
from rich.console import Console

from kvctl.engine.model_source import resolve_model
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.models.weight_layout import all_tensors, embedding_tensor

PEERS = Path.home() / ".cache" / "kvctl" / "peers"
README = Path(__file__).parent.parent / "README.md"
IN_PROCESS = Path(__file__).parent / "in_process_load.py"
KV_CACHE_GIB = 2
READY_LIMIT_S = 300
MARKS = ("<!-- begin results -->\n", "<!-- end results -->")


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` requests; `num_requests` in all."""

    name: str
    concurrency: int
    num_requests: int
    input_tokens: int
    output_tokens: int


LOADS = (
    Load("1 request", 1, 6, 256, 128),
    Load("4", 4, 16, 256, 128),
    Load("16", 16, 48, 256, 128),
    Load("64", 64, 128, 256, 128),
    Load("64 at once, 128/128", 64, 64, 128, 128),
)
QUICK_LOADS = (Load("1 request", 1, 2, 64, 16), Load("4", 4, 8, 64, 16))


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` takes the port and starts a server; None: driven in process by `python`."""

    name: str
    missing: Path | None  # what would have to be there
    command: Callable[[int], list[str]] | None
    environment: dict[str, str]
    python: str = sys.executable
    model: Path = Path()


@dataclass(slots=True)
class Result:
    """Of one engine; `output_rates` and `ttft_ms` by load."""

    engine: str
    ready_s: float = 0.0
    rss_bytes: int = 0
    output_rates: dict[str, list[float]] = field(default_factory=dict)
    ttft_ms: dict[str, list[float]] = field(default_factory=dict)


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
        prompt_s = 2 * (self.layer_params * load.input_tokens + self.head_params) / machine.flops_per_s
        return load.output_tokens / (prompt_s + load.output_tokens * step_s / rows)


def place(variable: str, default: str) -> Path:
    """Where a peer is said to be."""
    return Path(os.environ.get(variable) or PEERS / default)


def known_engines(model: Path) -> list[Engine]:
    """Ours twice, then the peers."""
    vllm, openvino = place("KVCTL_PEER_VLLM", "vllm"), place("KVCTL_PEER_OPENVINO", "openvino")
    ov_model = place("KVCTL_PEER_OV_MODEL", "ov-model")
    llama, gguf = place("KVCTL_PEER_LLAMACPP", "llama-server"), place("KVCTL_PEER_GGUF", "model.gguf")
    threads = str(os.cpu_count() or 1)

    def first_missing(*paths: Path) -> Path | None:
        return next((path for path in paths if not path.exists()), None)

    def kvctl_serve(port: int) -> list[str]:
        options = f"--port {port} --max-model-len 2048 --kv-cache-memory-bytes {KV_CACHE_GIB}GiB"
        return [sys.executable, "-m", "kvctl", "serve", str(model), *options.split()]

    def vllm_serve(port: int) -> list[str]:
        options = f"--host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len 2048"
        return [str(vllm / "bin" / "vllm"), "serve", str(model), *options.split()]

    def llama_server(port: int) -> list[str]:
        options = (
            f"--host 127.0.0.1 --port {port} -np 64 -c 32768 -t {threads} -tb {threads} -cb -b 2048 -ub 512 -fa on"
        )
        return [str(llama), "-m", str(gguf), *options.split()]

    return [
        Engine("kvctl", None, kvctl_serve, {}),
        Engine("kvctl, in process", None, None, {}, model=model),
        Engine("vLLM", first_missing(vllm / "bin" / "vllm"), vllm_serve, vllm_environment(vllm)),
        Engine("llama.cpp", first_missing(llama, gguf), llama_server, {}),
        Engine(
            "OpenVINO GenAI, in process",
            first_missing(openvino / "bin" / "python", ov_model),
            None,
            {},
            str(openvino / "bin" / "python"),
            ov_model,
        ),
    ]


def peer_environment() -> dict[str, str]:
    """Ours without what slows a current OpenBLAS down, and without a model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def vllm_environment(venv: Path) -> dict[str, str]:
    """All cores for the model, and the allocator and the OpenMP its documentation asks for, where they are."""
    preloaded = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), venv / "lib" / "libiomp5.so"]
    found = ":".join(str(path) for path in preloaded if path.exists())
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default it keeps a core for itself
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": found,
    }


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resident_bytes(pid: int) -> int:
    """Of a process and all it started, memory they share counted once."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    total = int(found[1]) * 1024 if found else 0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        total += sum(resident_bytes(int(child)) for child in children.read_text().split())
    return total


def run_served(engine: Engine, loads: tuple[Load, ...], runs: int, folder: Path) -> Result:
    """Start, wait, warm, load, stop.

    Raises:
        RuntimeError: it ends or is not ready in time; the message is the end of its log.
    """
    assert engine.command is not None
    port = free_port()
    log = folder / f"{engine.name}.log"
    environment = {**peer_environment(), **engine.environment}
    started_s = time.monotonic()
    with log.open("wb") as output:
        server = subprocess.Popen(engine.command(port), stdout=output, stderr=output, env=environment)
    try:
        result = Result(engine.name)
        url = f"http://127.0.0.1:{port}"
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() - started_s > READY_LIMIT_S:
                raise RuntimeError("\n".join(log.read_text(errors="replace").splitlines()[-5:]))
            time.sleep(0.02)
        result.ready_s = time.monotonic() - started_s
        bench(url, Load("warm-up", 4, 4, 64, 8), folder)
        for _ in range(runs):
            for load in loads:
                summary = bench(url, load, folder)
                result.output_rates.setdefault(load.name, []).append(summary["output_throughput"])
                result.ttft_ms.setdefault(load.name, []).append(summary["ttft_ms"]["p50"])
        result.rss_bytes = resident_bytes(server.pid)
        return result
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def is_ready(url: str) -> bool:
    """Whether /health answers with 200."""
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def bench(url: str, load: Load, folder: Path) -> dict:
    """One run of `kvctl bench`, with prompts of its own; returns its summary.

    Raises:
        RuntimeError: it failed, or some of its requests did.
    """
    path = folder / "bench.json"
    command = [sys.executable, "-m", "kvctl", "bench", "run", url, "-c", str(load.concurrency)]
    command += ["-n", str(load.num_requests), "--input-tokens", str(load.input_tokens)]
    command += ["--output-tokens", str(load.output_tokens), "--no-calibrate", "--quiet", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kvctl bench exited with {done.returncode}: {done.stderr.strip()[-500:]}")
    summary: dict = json.loads(path.read_text())["summary"]
    if summary["failed"] > 0:
        raise RuntimeError(f"{summary['failed']} of {load.num_requests} requests failed")
    return summary


def run_in_process(engine: Engine, loads: tuple[Load, ...], runs: int, folder: Path) -> Result:
    """Each load in a process of its own, without HTTP.

    Raises:
        RuntimeError: it fails.
    """
    result = Result(engine.name)
    for _ in range(runs):
        for load in loads:
            numbers = [load.concurrency, load.num_requests, load.input_tokens, load.output_tokens]
            command = [engine.python, str(IN_PROCESS), engine.name.split(",")[0].split()[0].lower(), str(engine.model)]
            done = subprocess.run(
                [*command, *map(str, numbers), str(KV_CACHE_GIB)],
                capture_output=True,
                text=True,
                check=False,
                env=peer_environment(),
            )
            if done.returncode != 0:
                raise RuntimeError(done.stderr.strip()[-500:])
            measured = json.loads(done.stdout.splitlines()[-1])
            result.output_rates.setdefault(load.name, []).append(measured["output_tokens_per_s"])
            if measured["ttft_p50_ms"] is not None:
                result.ttft_ms.setdefault(load.name, []).append(measured["ttft_p50_ms"])
            result.ready_s = measured["ready_s"]
            result.rss_bytes = max(result.rss_bytes, measured["rss_bytes"])
    return result


def report(
    results: list[Result], not_run: dict[str, str], loads: tuple[Load, ...], work: Work, machine: Machine, runs: int
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
        for result in ours:
            cells = []
            for load in loads:
                best = max(statistics.median(peer.output_rates[load.name]) for peer in peers)
                cells.append(f"{statistics.median(result.output_rates[load.name]) / best:.2f}x")
            lines.append(f"| {result.engine} | " + " | ".join(cells) + " |")
    if not_run:
        lines += ["", "Not run: " + "; ".join(f"{name} ({why})" for name, why in not_run.items()) + "."]
    return "\n".join(lines)


def write_readme(text: str) -> None:
    """Put the text between the marks; the section is added before the first time."""
    old = README.read_text(encoding="utf-8")
    if MARKS[0] not in old:
        section = f"## Beside other CPU engines\n\n{MARKS[0]}{MARKS[1]}\n\n"
        at = old.find("## Security")
        old = old[:at] + section + old[at:] if at >= 0 else old + "\n" + section
    pattern = re.compile(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), re.DOTALL)
    README.write_text(pattern.sub(lambda _: f"{MARKS[0]}\n{text}\n\n{MARKS[1]}", old), encoding="utf-8")


def main() -> int:
    """Measure what is there; exit code 1 if an engine that is there failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two small loads, to see that everything works")
    parser.add_argument("--only", default="", help="engines by the beginning of their name, with commas")
    parser.add_argument("--write-readme", action="store_true", help="put the tables into README.md")
    options = parser.parse_args()
    console = Console(stderr=True)
    loads = QUICK_LOADS if options.quick else LOADS
    wanted = tuple(name.strip().lower() for name in options.only.split(",") if name.strip())
    model = resolve_model(None, revision=None, progress=lambda *_: None).folder
    machine, results, not_run, failed = Machine(), [], {}, False
    for engine in known_engines(model):
        if wanted and not engine.name.lower().startswith(wanted):
            not_run[engine.name] = "not asked for"
            continue
        if engine.missing is not None:
            not_run[engine.name] = f"there is no {engine.missing}"
            continue
        console.print(f"{engine.name} ...")
        machine.measure()
        run = run_in_process if engine.command is None else run_served
        with tempfile.TemporaryDirectory(prefix="kvctl-compare-") as folder:
            try:
                results.append(run(engine, loads, options.runs, Path(folder)))
            except RuntimeError as error:
                failed = True
                not_run[engine.name] = "it failed"
                console.print(f"{engine.name} failed: {error}", markup=False)
    machine.measure()
    text = report(results, not_run, loads, Work.of(model), machine, options.runs)
    print(text)
    if options.write_readme:
        write_readme(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
