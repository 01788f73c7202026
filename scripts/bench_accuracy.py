#!/usr/bin/env python3
"""Measure the error and the cost of `kvctl bench` on a scripted server, and other load generators beside it.

The server (`kvctl bench mock`: TTFT 50 ms, gap 10 ms, 32 tokens) logs when each request arrived and each event was
written, so what a client reports can be held against what happened; errors are shares of the script's values. Parts:

    accuracy   at 1, 16, 64 and 256 streams: TTFT and gap p50 against the log, in-flight, CPU per event, memory
    streams    the streams that clients misread: role and finish deltas, four tokens an event, reasoning first, faults
    memory     --minutes of 256 streams: the most memory, and whether it grows
    peers      vllm bench serve, GuideLLM and AIPerf at 256 streams beside ours, each from an environment of its own

The peers want a tokenizer (--tokenizer FOLDER, that of the demo model by default); scripts/bench_peers.py says where
they are looked for. CPU per event is user and system time of the client from the start of the load to its last answer,
over the events with tokens: what starts before (imports, self-calibration) is not in it, everything else is.

Run it while the machine does nothing else. Exit code 0: all targets hold; 1: one does not.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_peers import DEFAULT_TOKENIZER, install_peers, measure_peers
from bench_rig import (
    LENGTHS,
    SCRIPT_GAP_MS,
    SCRIPT_TTFT_MS,
    bench,
    bench_command,
    or_dash,
    requests_for,
    truth,
)
from bench_streams import measure_streams

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
from kvctl.metrics.summary import percentile

CONCURRENCIES = (1, 16, 64, 256)
MAX_TTFT_ERROR_SHARE, MAX_TTFT_ERROR_MS, MAX_GAP_ERROR_SHARE, MAX_CPU_US, MAX_RSS_MB = 0.03, 2.0, 0.01, 15.0, 120.0
MAX_GROWTH_MB = 3.0  # between the second quarter of a run and its last
PARTS = ("accuracy", "streams", "memory", "peers")


def measure_accuracy(repeats: int) -> bool:
    """Print the accuracy table; returns whether every target held (median of the repeats)."""
    print("accuracy: client p50 against the log of the server (script: TTFT 50 ms, gap 10 ms, 32 tokens)")
    columns = (
        ("c", 4), ("run", 4), ("TTFT client/log ms", 21), ("err ms", 8), ("err", 7), ("gap client/log ms", 20),
        ("err", 7), ("p99 TTFT", 10), ("p99 gap", 9), ("in flight", 10), ("ev/s", 8), ("us/ev", 7), ("RSS MB", 7),
    )  # fmt: skip
    print("".join(f"{name:>{width}}" for name, width in columns) + "  verdict")
    all_hold = True
    with start_mock_process(MockScript()) as url:
        for concurrency in CONCURRENCIES:
            ttft_errors, gap_errors, cpu, rss, in_flight, keeps = [], [], [], [], [], []
            for run in range(repeats):
                truth(url)
                n = requests_for(concurrency)
                result = bench(url, "-c", str(concurrency), "-n", str(n), *LENGTHS)
                ttfts, gaps, most = truth(url)  # the test request before the load is one of the log's streams
                summary, client = result["summary"], result["client"]
                ttft, gap = summary["ttft_ms"]["p50"], summary["gap_ms"]["p50"]
                ttft_log, gap_log = percentile(ttfts, 50) * 1e3, percentile(gaps, 50) * 1e3
                ttft_errors.append(ttft - ttft_log)
                gap_errors.append((gap - gap_log) / SCRIPT_GAP_MS)
                keeps.append(abs(gap_log / SCRIPT_GAP_MS - 1) < 0.05 and ttft_log / SCRIPT_TTFT_MS < 1.1)
                cpu.append(client["cpu_us_per_event"])
                rss.append(client["max_rss_mb"])
                in_flight.append(most)
                off_ms = ttft - ttft_log
                cells = (
                    str(concurrency), str(run + 1), f"{ttft:.3f} / {ttft_log:.3f}", f"{off_ms:+.3f}",
                    f"{off_ms / SCRIPT_TTFT_MS:+.1%}", f"{gap:.3f} / {gap_log:.3f}", f"{gap_errors[-1]:+.1%}",
                    or_dash(summary["ttft_ms"]["p99"]), or_dash(summary["gap_ms"]["p99"]), str(most),
                    f"{client['events_per_s']:,.0f}", f"{cpu[-1]:.1f}", f"{rss[-1]:.0f}",
                )  # fmt: skip
                print("".join(f"{c:>{w}}" for c, (_, w) in zip(cells, columns, strict=True)) + f"  {client['verdict']}")
            error_ms, gap_error = statistics.median(ttft_errors), statistics.median(gap_errors)
            checks = [
                ("TTFT", abs(error_ms) <= MAX_TTFT_ERROR_MS and abs(error_ms) <= MAX_TTFT_ERROR_SHARE * SCRIPT_TTFT_MS),
                ("gap", abs(gap_error) <= MAX_GAP_ERROR_SHARE),
                ("in flight", set(in_flight) == {concurrency}),
            ]
            if concurrency == max(CONCURRENCIES):
                checks += [("CPU", min(cpu) <= MAX_CPU_US), ("memory", max(rss) <= MAX_RSS_MB)]
            if not any(keeps):
                checks.append(("the server could not keep its script: too busy a machine to judge", False))
            broken = [name for name, holds in checks if not holds]
            all_hold = all_hold and not broken
            print(f"{concurrency:>4}      {'holds' if not broken else 'MISSED: ' + ', '.join(broken)}")
    return all_hold


def measure_memory(minutes: float) -> bool:
    """Print the memory of a long run at 256 streams; returns whether it stays under its limit and does not grow."""
    duration_s = minutes * 60
    print(f"\nmemory: {max(CONCURRENCIES)} streams for {minutes:g} minutes (MB resident, once a second)", flush=True)
    with start_mock_process(MockScript()) as url, tempfile.TemporaryDirectory() as folder:
        load = ("-c", str(max(CONCURRENCIES)), "-d", f"{duration_s:g}s", *LENGTHS)
        files = ("--html", f"{folder}/r.html", "--csv", f"{folder}/r.csv")
        command = bench_command(url, *load, *files, result=f"{folder}/r.json")
        begin_s = time.monotonic()
        found: list[tuple[float, float, float]] = []
        with subprocess.Popen(command) as process:
            while process.poll() is None:
                now, most = _resident_mb(process.pid)
                found.append((time.monotonic() - begin_s, now, most))
                time.sleep(1.0)
        code = process.returncode
    loading = [now for at_s, now, _ in found if 2.0 < at_s < duration_s]
    most = max((most for *_, most in found), default=0.0)
    if code not in (0, 6) or len(loading) < 8:
        print(f"  MISSED: the run ended with {code} after {len(found)} s")
        return False
    quarters = [loading[i * len(loading) // 4 : (i + 1) * len(loading) // 4] for i in range(4)]
    told = ", ".join(f"{max(quarter):.1f}" for quarter in quarters)
    growth = max(quarters[3]) - max(quarters[1])
    holds = most <= MAX_RSS_MB and growth <= MAX_GROWTH_MB
    print(f"  most in each quarter {told}; from the second to the last {growth:+.1f}; most with the report {most:.1f}")
    print(f"  {'holds' if holds else 'MISSED'}: at most {MAX_RSS_MB:.0f} MB, growth at most {MAX_GROWTH_MB:.0f} MB")
    return holds


def _resident_mb(pid: int) -> tuple[float, float]:
    """(now, most so far) of a process; zeros when it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    values = dict(line.split(":", 1) for line in lines if line.startswith(("VmRSS:", "VmHWM:")))
    now, most = (int(values[name].split()[0]) * 1024 / 1e6 if name in values else 0.0 for name in ("VmRSS", "VmHWM"))
    return now, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs per number of streams (peers: at most 2)")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the memory run")
    parser.add_argument("--install-peers", action="store_true", help="install those that are missing first")
    parser.add_argument("--nice", type=int, default=0, help="priority of it all, e.g. -15 on a busy machine (root)")
    parser.add_argument("--tokenizer", type=Path, default=DEFAULT_TOKENIZER, help="for the peers: a folder with one")
    arguments = parser.parse_args()
    if arguments.install_peers:
        install_peers()
    if arguments.nice:
        os.setpriority(os.PRIO_PROCESS, 0, arguments.nice)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{' - BUSY: expect noise' if load > 0.7 else ''}", flush=True)
    chosen = PARTS if arguments.only is None else (arguments.only,)
    holds = True
    if "accuracy" in chosen:
        holds = measure_accuracy(arguments.repeats) and holds
    if "streams" in chosen:
        holds = measure_streams() and holds
    if "memory" in chosen:
        holds = measure_memory(arguments.minutes) and holds
    if "peers" in chosen:
        holds = measure_peers(max(CONCURRENCIES), arguments.tokenizer, min(arguments.repeats, 2)) and holds
    width = shutil.get_terminal_size().columns
    print("\n" + ("all targets hold" if holds else "a target was missed")[:width])
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
