"""What the parts of `bench_accuracy.py` share: a run of `kvctl bench`, and what the scripted server says happened."""

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import httpx

SCRIPT_TTFT_MS, SCRIPT_GAP_MS, SCRIPT_TOKENS = 50.0, 10.0, 32
LENGTHS = ("--input-tokens", "32", "--output-tokens", str(SCRIPT_TOKENS))


class BenchFailed(Exception):
    """A run without a result."""


def bench_command(url: str, *arguments: str, result: str = "-") -> list[str]:
    """The command of a run without what is not measured here."""
    command = [sys.executable, "-m", "kvctl", "bench", url, "--json", result, "-q", "--no-calibrate", "--no-metrics"]
    return [*command, *arguments]


def bench(url: str, *arguments: str) -> dict[str, Any]:
    """Run `kvctl bench` as a user does and return its JSON.

    Raises:
        BenchFailed: it printed none.
    """
    done = subprocess.run(bench_command(url, *arguments), capture_output=True, text=True, timeout=300)
    try:
        result: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        told = done.stderr.strip() or f"{len(done.stdout)} characters that are no JSON"
        raise BenchFailed(f"kvctl bench failed with {done.returncode}: {told}") from None
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


def or_dash(value: float | None) -> str:
    """A latency in ms, or a dash for one that is not known."""
    return "-" if value is None else f"{value:.1f}"
