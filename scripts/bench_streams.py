"""Part `streams` of `bench_accuracy.py`: the streams that clients misread, each with what a right client reports."""

from collections.abc import Callable
from typing import Any

from bench_rig import BenchFailed, bench, or_dash

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript

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
                except BenchFailed:
                    continue
                break
            holds = result is not None and check(result)
            all_hold = all_hold and holds
            told = "no result" if result is None else _told(result)
            print(f"  {'exact ' if holds else 'MISSED'}  {name:<28} {told}")
    return all_hold


def _told(result: dict[str, Any]) -> str:
    summary = result["summary"]
    parts = [f"{name} {or_dash(summary[f'{name}_ms']['p50'])}" for name in ("ttft", "ttfo", "tpot", "gap")]
    parts.append(f"tokens/event {summary['tokens_per_event']}")
    parts += [f"{kind} {entry['count']}" for kind, entry in result["errors"].items()]
    return ", ".join(parts)
