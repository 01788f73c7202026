#!/usr/bin/env python3
"""Print what `kvctl serve` costs and gives on this machine: time to ready, tokens per second, latency, memory, restart.

Starts the demo model, loads it with `kvctl bench` (prompts of 256 tokens, 128 out, ignoring the end token, greedy) at
each concurrency, and reads the peak memory of both processes afterwards. Then it kills the engine and starts the server
again, as a supervisor does: from the kill to the next answer under five seconds may pass, or the exit code is 1.

    python scripts/serve_figures.py [--concurrency 1,4,16,64] [--json FILE] [-- OPTIONS OF kvctl serve]
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from server_under_test import ServerUnderTest

MAX_RESTART_S = 5.0


def bench(url: str, concurrency: int, num_requests: int) -> dict[str, Any]:
    """One run of `kvctl bench`; its JSON."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "kvctl", "bench", "run", url, "--endpoint", "completions"]
        command += ["--concurrency", str(concurrency), "--requests", str(num_requests), "--seed", str(concurrency)]
        command += ["--input-tokens", "256", "--output-tokens", "128", "--quiet", "--json", str(path)]
        subprocess.run(command, check=False)
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def peak_rss_bytes(pid: int) -> int:
    """VmHWM: the most memory a process has had resident."""
    found = re.search(r"^VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def restart_s(server: ServerUnderTest, arguments: list[str]) -> float:
    """Seconds from the death of the engine to the first answer of the server that is started instead."""
    killed_s = time.monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    server.process.wait(30)
    with ServerUnderTest(*arguments) as again:
        body = {"prompt": "Are you there?", "max_tokens": 1}
        httpx.post(f"{again.url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        return time.monotonic() - killed_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("serve", nargs="*", help="options of kvctl serve, after --")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    started_s = time.monotonic()
    with ServerUnderTest(*args.serve) as server:
        ready_s = time.monotonic() - started_s
        for concurrency in map(int, args.concurrency.split(",")):
            result = bench(server.url, concurrency, max(4, 3 * concurrency))
            summary = result["summary"]
            rows.append(
                {
                    "concurrency": concurrency,
                    "completed": summary["completed"],
                    "failed": summary["failed"],
                    "output_tokens_per_s": summary["output_throughput"],
                    "ttft_p50_ms": summary["ttft_ms"]["p50"],
                    "tpot_p50_ms": summary["tpot_ms"]["p50"],
                    "verdict": result["client"]["verdict"],
                }
            )
        peaks = {"api": peak_rss_bytes(server.process.pid), "engine": peak_rss_bytes(server.engine_pid)}
        again_s = restart_s(server, args.serve)
    table = Table(
        "at once", "output tok/s", "TTFT p50 ms", "TPOT p50 ms", "done", "failed", "client", box=box.SIMPLE_HEAD
    )
    for row in rows:
        table.add_row(
            str(row["concurrency"]),
            f"{row['output_tokens_per_s']:.1f}",
            f"{row['ttft_p50_ms']:.0f}",
            f"{row['tpot_p50_ms']:.2f}",
            str(row["completed"]),
            str(row["failed"]),
            str(row["verdict"]),
        )
    Console().print(table)
    print(f"ready {ready_s:.2f} s after the command; peak memory: API {peaks['api'] / 2**20:.0f} MiB, "
          f"engine {peaks['engine'] / 2**20:.0f} MiB (with the touched part of the KV cache)")  # fmt: skip
    print(f"answers again {again_s:.2f} s after its engine was killed (under {MAX_RESTART_S:g} s is asked)")
    if args.json:
        figures = {"ready_s": ready_s, "restart_s": again_s, "peak_rss_bytes": peaks, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=1))
    return int(again_s >= MAX_RESTART_S)


if __name__ == "__main__":
    sys.exit(main())
