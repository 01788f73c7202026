#!/usr/bin/env python3
"""Measure the error of `kvctl bench`, and of other load generators where they are installed, on a scripted server.

The server (`kvctl bench mock`: TTFT 50 ms, gap 10 ms, 32 tokens) logs when each request arrived and each event was
written, so what a client reports can be held against what happened; errors are shares of the script's values. Parts:

    accuracy   at 1, 16, 64 and 256 streams: TTFT and gap p50 against the log, in-flight, CPU per event, memory
    streams    the streams that clients misread: role and finish deltas, four tokens an event, reasoning first, faults
    peers      vllm bench serve, GuideLLM and AIPerf at 256 streams, each from a venv of its own

Peers are run from PEERS/<name>/bin, if they are there (--install-peers makes them: gigabytes, minutes):
    vllm      python -m venv PEERS/vllm     && PEERS/vllm/bin/pip install vllm
    guidellm  python -m venv PEERS/guidellm && PEERS/guidellm/bin/pip install guidellm
    aiperf    python -m venv PEERS/aiperf   && PEERS/aiperf/bin/pip install aiperf
They want a tokenizer: --tokenizer FOLDER, e.g. that of the demo model.

Run it while the machine does nothing else. Exit code 0: all targets hold; 1: one does not.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
from kvctl.metrics.summary import percentile

SCRIPT_TTFT_MS, SCRIPT_GAP_MS = 50.0, 10.0
CONCURRENCIES = (1, 16, 64, 256)
MAX_TTFT_ERROR_SHARE, MAX_TTFT_ERROR_MS, MAX_GAP_ERROR_SHARE, MAX_CPU_US, MAX_RSS_MB = 0.03, 2.0, 0.01, 15.0, 120.0
DEFAULT_PEERS = Path.home() / ".cache" / "kvctl" / "bench-peers"
PACKAGES = {"vllm": "vllm", "guidellm": "guidellm", "aiperf": "aiperf"}


def bench(url: str, *arguments: str) -> dict[str, Any]:
    """Run `kvctl bench` as a user does and return its JSON."""
    command = [sys.executable, "-m", "kvctl", "bench", url, "--json", "-", "-q", "--no-calibrate", "--no-metrics"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 1, 5, 6):
        sys.exit(f"kvctl bench failed with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def truth(url: str) -> tuple[list[float], list[float], int]:
    """TTFTs and gaps (s) as the server's log has them, and the most streams it saw at once; forgets them."""
    with httpx.Client(trust_env=False, timeout=60) as client:
        log = client.get(f"{url}/mock/log").json()
        client.get(f"{url}/mock/reset")
    ttfts = sorted(times[0] - received for _, received, times in log["streams"] if times)
    gaps = sorted(b - a for _, _, times in log["streams"] for a, b in pairwise(times))
    return ttfts, gaps, log["max_running"]


def requests_for(concurrency: int) -> int:
    """Ten rounds, and never fewer than twenty requests."""
    return max(20, 10 * concurrency)


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
                result = bench(
                    url, "-c", str(concurrency), "-n", str(n), "--input-tokens", "32", "--output-tokens", "32"
                )
                ttfts, gaps, most = truth(url)
                # one test request and two of known length come before the load; they are three of the log's streams
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
                    _or_dash(summary["ttft_ms"]["p99"]), _or_dash(summary["gap_ms"]["p99"]), str(most),
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


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# ---- special streams ----

Check = Callable[[dict[str, Any]], bool]


def near(value: float | None, wanted: float, share: float = 0.03) -> bool:
    """Whether a latency is within 3 % (and 2 ms) of the script."""
    return value is not None and abs(value - wanted) <= max(share * wanted, 0.1) and abs(value - wanted) <= 2.0


def summary_check(**wanted: float) -> Check:
    """A check that p50s (or plain numbers) of the summary are near the script's."""

    def check(result: dict[str, Any]) -> bool:
        summary = result["summary"]
        found = {name: summary[name]["p50"] if isinstance(summary[name], dict) else summary[name] for name in wanted}
        return all(near(found[name], value) for name, value in wanted.items()) and summary["failed"] == 0

    return check


def error_check(kind: str) -> Check:
    """A check that about half failed, in one way, and that the others' latencies are untouched by it."""

    def check(result: dict[str, Any]) -> bool:
        summary = result["summary"]
        is_half = 8 <= summary["failed"] <= 32 and summary["completed"] + summary["failed"] == 40
        is_clean = near(summary["ttft_ms"]["p50"], 50) and near(summary["tpot_ms"]["p50"], 10)
        return set(result["errors"]) == {kind} and is_half and is_clean

    return check


def faulty(kind: str) -> MockScript:
    """Half of the requests meet a fault."""
    return MockScript(fault=kind, fault_share=0.5, retry_after_s=0.2)


PLAIN = {"ttft_ms": 50.0, "tpot_ms": 10.0, "gap_ms": 10.0}
FOUR = {"ttft_ms": 50.0, "tpot_ms": 10.0, "gap_ms": 40.0, "tokens_per_event": 4.0}
TRICKLE = {"ttft_ms": 50.0, "tpot_ms": 20.0, "gap_ms": 20.0}
THINKS = {"ttft_ms": 50.0, "ttfo_ms": 210.0, "tpot_ms": 10.0}
CHAT = ("--endpoint", "chat")
SPECIAL: tuple[tuple[str, MockScript, tuple[str, ...], Check], ...] = (
    ("empty role delta first", MockScript(), CHAT, summary_check(**PLAIN)),
    ("no finish delta", MockScript(finish_delta=False), (), summary_check(**PLAIN)),
    ("four tokens per event", MockScript(tokens_per_event=4), (), summary_check(**FOUR)),
    ("continuous usage", MockScript(tokens_per_event=4), ("--continuous-usage",), summary_check(**FOUR)),
    ("reasoning first", MockScript(reasoning_tokens=16), CHAT, summary_check(**THINKS)),
    ("usage missing", MockScript(usage=False), (), summary_check(**PLAIN)),
    ("slow trickle, 24 bytes", MockScript(trickle_bytes=24, gap_s=0.02), (), summary_check(**TRICKLE)),
    ("events of 1 MB", MockScript(event_bytes=1 << 20, gap_s=0.2, tokens=4), (), summary_check(gap_ms=200.0)),
    ("error in mid-stream", faulty("error"), (), error_check("stream_error")),
    ("connection cut", faulty("cut"), (), error_check("cut")),
    ("HTTP 429 with Retry-After", faulty("429"), (), error_check("http_429")),
    ("HTTP 503 with Retry-After", faulty("503"), (), error_check("http_503")),
)


def measure_streams() -> bool:
    """Print one line per special stream; returns whether all were read right."""
    print("\nstreams that clients misread, at 4 streams")
    all_hold = True
    for name, script, arguments, check in SPECIAL:
        with start_mock_process(script) as url:
            result = None
            for _ in range(8):  # the test request may meet the fault
                command = (*arguments, "-c", "4", "-n", "40", "--input-tokens", "16", "--output-tokens", "32")
                try:
                    result = bench(url, *command, "--max-error-rate", "1")
                except json.JSONDecodeError:
                    continue
                break
            holds = result is not None and check(result)
            all_hold = all_hold and holds
            told = "no result" if result is None else _told(result)
            print(f"  {'exact ' if holds else 'MISSED'}  {name:<28} {told}")
    return all_hold


def _told(result: dict[str, Any]) -> str:
    summary = result["summary"]
    parts = [f"{name} {_or_dash(summary[f'{name}_ms']['p50'])}" for name in ("ttft", "ttfo", "tpot", "gap")]
    parts.append(f"tokens/event {summary['tokens_per_event']}")
    parts += [f"{kind} {entry['count']}" for kind, entry in result["errors"].items()]
    return ", ".join(parts)


# ---- other clients ----


def peer_commands(name: str, program: Path, url: str, out: Path, concurrency: int, tokenizer: str) -> list[str]:
    """The command that makes a peer run the same load."""
    n = str(requests_for(concurrency))
    if name == "vllm":
        return [str(program), "bench", "serve", "--backend", "openai-chat", "--base-url", url, "--endpoint",
                "/v1/chat/completions", "--model", "mock", "--tokenizer", tokenizer, "--dataset-name", "random",
                "--random-input-len", "32", "--random-output-len", "32", "--num-prompts", n, "--max-concurrency",
                str(concurrency), "--save-result", "--result-dir", str(out), "--result-filename", "r.json"]  # fmt: skip
    if name == "guidellm":
        return [str(program), "benchmark", "--target", url, "--model", "mock", "--processor", tokenizer, "--rate-type",
                "concurrent", "--rate", str(concurrency), "--max-requests", n, "--data",
                "prompt_tokens=32,output_tokens=32", "--output-path", str(out / "r.json")]  # fmt: skip
    return [str(program), "profile", "--model", "mock", "--url", url, "--endpoint-type", "chat", "--streaming",
            "--concurrency", str(concurrency), "--request-count", n, "--tokenizer", tokenizer, "--isl", "32", "--osl",
            "32", "--ui", "none", "--artifact-dir", str(out)]  # fmt: skip


def peer_figures(name: str, out: Path) -> tuple[float | None, float | None]:
    """(TTFT p50, gap p50) in ms, as the peer's own file says."""
    if name == "vllm":
        value = json.loads((out / "r.json").read_text())
        return value.get("median_ttft_ms"), value.get("median_itl_ms")
    if name == "guidellm":
        metrics = json.loads((out / "r.json").read_text())["benchmarks"][0]["metrics"]
        return (
            metrics["time_to_first_token_ms"]["successful"]["median"],
            metrics["inter_token_latency_ms"]["successful"]["median"],
        )
    found = next(out.rglob("profile_export_aiperf.json"))
    value = json.loads(found.read_text())
    return value["time_to_first_token"]["p50"], value["inter_token_latency"]["p50"]


def measure_peers(folder: Path, concurrency: int, tokenizer: str) -> None:
    """Print what each installed peer reports of the same server, next to the server's log."""
    print(
        f"\nother clients at {concurrency} streams (TTFT and gap p50 in ms: reported, and as the server's log has it)"
    )
    for name in PACKAGES:
        program = folder / name / "bin" / name
        if not program.exists():
            print(f"  skipped  {name:<9} not installed in {folder / name} (see --help)")
            continue
        with start_mock_process(MockScript()) as url, tempfile.TemporaryDirectory() as out:
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
            command = peer_commands(name, program, url, Path(out), concurrency, tokenizer)
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=out)
            ttfts, gaps, most = truth(url)
            said = (done.stderr or done.stdout).strip()[-160:]
            if done.returncode or not ttfts:
                print(f"  failed   {name:<9} exit code {done.returncode}: {said!r}")
                continue
            ttft, gap = peer_figures(name, Path(out))
            ttft_log, gap_log = percentile(ttfts, 50) * 1e3, percentile(gaps, 50) * 1e3
            print(
                f"  ran      {name:<9} TTFT {_or_dash(ttft)} / {ttft_log:.1f} ({(ttft or 0) / ttft_log - 1:+.0%}), "
                f"gap {_or_dash(gap)} / {gap_log:.1f}, in flight {most}"
            )


def install_peers(folder: Path) -> None:
    """Make a venv for each peer that is missing."""
    for name, package in PACKAGES.items():
        if not (folder / name / "bin" / name).exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
            subprocess.run([str(folder / name / "bin" / "pip"), "install", package], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs per number of streams")
    parser.add_argument("--only", choices=("accuracy", "streams", "peers"), help="one part of it")
    parser.add_argument("--peers", type=Path, default=DEFAULT_PEERS, help="folder of the peers' venvs")
    parser.add_argument("--install-peers", action="store_true", help="install them there first")
    parser.add_argument("--nice", type=int, default=0, help="priority of it all, e.g. -15 on a busy machine (root)")
    parser.add_argument("--tokenizer", default="gpt2", help="for the peers: a folder with a tokenizer")
    arguments = parser.parse_args()
    if arguments.install_peers:
        install_peers(arguments.peers)
    if arguments.nice:
        os.setpriority(os.PRIO_PROCESS, 0, arguments.nice)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}{' - BUSY: expect noise' if load > 0.7 else ''}", flush=True)
    holds = True
    if arguments.only in (None, "accuracy"):
        holds = measure_accuracy(arguments.repeats) and holds
    if arguments.only in (None, "streams"):
        holds = measure_streams() and holds
    if arguments.only in (None, "peers"):
        measure_peers(arguments.peers, max(CONCURRENCIES), arguments.tokenizer)
    width = shutil.get_terminal_size().columns
    print("\n" + ("all targets hold" if holds else "a target was missed")[:width])
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
