#!/usr/bin/env python3
"""Ours beside the other CPU engines that are installed here: one after another, the same load, the same bounds.

    scripts/compare_engines.py [--runs 3] [--quick] [--only kvctl,vllm] [--write-readme]

Each engine is started, waited for, warmed and loaded by `kvctl bench` through HTTP, then stopped. OpenVINO GenAI has no
server of its own and is driven in process (scripts/in_process_load.py); ours is measured both ways, so that like stands
beside like. Between the engines the machine's read bandwidth and bfloat16 matmul rate are measured; the percent of the
bound come from their best values in this run. Ours runs once more with and without its prefix cache, on prompts that
begin alike. Run it on an otherwise idle machine. Where the peers are looked for stands in scripts/peer_engines.py; one
that is not there is named as not run.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import httpx
from compare_report import KV_CACHE_GIB, SHARED_PREFIX, Load, Machine, Result, Work, report
from peer_engines import Engine, known_engines, peer_environment
from rich.console import Console

from kvctl.engine.model_source import resolve_model

README = Path(__file__).parent.parent / "README.md"
IN_PROCESS = Path(__file__).parent / "in_process_load.py"
READY_LIMIT_S = 300
CLIENT_LIMITED = 6  # exit code of `kvctl bench`
LOADS = (
    Load("1 request", 1, 6, 256, 128),
    Load("4", 4, 16, 256, 128),
    Load("16", 16, 48, 256, 128),
    Load("64", 64, 128, 256, 128),
    Load("64 at once, 128/128", 64, 64, 128, 128),
)
QUICK_LOADS = (Load("1 request", 1, 2, 64, 16), Load("4", 4, 8, 64, 16))
MARKS = ("<!-- begin results -->\n", "<!-- end results -->")


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
        server = subprocess.Popen(
            engine.command(port), stdout=output, stderr=output, env=environment, start_new_session=True
        )
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
                result.tpot_ms.setdefault(load.name, []).append(summary["tpot_ms"]["p50"])
        result.rss_bytes = resident_bytes(server.pid)
        return result
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        with contextlib.suppress(ProcessLookupError):  # processes that outlived it would disturb the next engine
            os.killpg(server.pid, signal.SIGKILL)


def run_prefix(engine: Engine, folder: Path) -> tuple[float, float]:
    """Time to first token, p50 ms, of prompts that begin alike: with the prefix cache, and without."""
    serve = engine.command
    assert serve is not None

    def ttft_ms(*more: str) -> float:
        variant = replace(engine, command=lambda port: [*serve(port), *more])
        return run_served(variant, (SHARED_PREFIX,), 1, folder).ttft_ms[SHARED_PREFIX.name][0]

    return ttft_ms(), ttft_ms("--no-enable-prefix-caching")


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
    if load.shared_prefix_tokens:
        command += ["--shared-prefix", str(load.shared_prefix_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (
        0,
        CLIENT_LIMITED,
    ):  # the machine is small, and shared with the server: no reason to stop
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
    prefix_ms: tuple[float, float] | None = None
    for engine in known_engines(model):
        if wanted and not engine.name.lower().startswith(wanted):
            not_run[engine.name] = "not asked for"
            continue
        if engine.missing is not None:
            not_run[engine.name] = f"there is no {str(engine.missing).replace(str(Path.home()), '~')}"
            continue
        console.print(f"{engine.name} ...")
        machine.measure()
        run = run_in_process if engine.command is None else run_served
        with tempfile.TemporaryDirectory(prefix="kvctl-compare-") as folder:
            try:
                if engine.name == "kvctl" and not options.quick:
                    prefix_ms = run_prefix(engine, Path(folder))
                results.append(run(engine, loads, options.runs, Path(folder)))
            except RuntimeError as error:
                failed = True
                not_run[engine.name] = "it failed"
                console.print(f"{engine.name} failed: {error}", markup=False)
    machine.measure()
    text = report(results, not_run, loads, Work.of(model), machine, options.runs, prefix_ms)
    print(text)
    if options.write_readme:
        write_readme(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
