"""Joins what the server said of itself with the run: which limit bound when, cache hits, work per step. Pure.

A stretch between two readings gets one word, see `LIMIT_MEANINGS`. Floor 3.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from kvctl.bench.server_monitor import Reading
from kvctl.metrics.server_names import Counter, Gauge, Server

_KV_FULL = 0.95
_STEP_FULL = 0.9
_HIT_WORTH_SAYING = 0.01
LIMIT_MEANINGS = {
    "kv_blocks": "the KV cache was full while requests waited, or requests were preempted",
    "max_num_seqs": "running stayed at its most while requests waited and the cache had room",
    "token_budget": "steps were full of tokens",
    "waiting": "requests waited; the metrics do not show for what",
    "load": "nothing waited: more load would have been taken",
}


def build_server_report(
    readings: Sequence[Reading], server: Server | None, start_s: float, issue_end_s: float, end_s: float
) -> dict[str, Any] | None:
    """The `server` object of a result; None without readings. Figures are of the time up to the end of the issuing."""
    if not readings or server is None or server is Server.UNKNOWN:
        return None
    during = [reading for reading in readings if start_s <= reading.time_s <= issue_end_s]
    during = during or list(readings)
    shown = [reading for reading in readings if start_s <= reading.time_s <= end_s] or list(readings)
    first, last = readings[0], readings[-1]
    stretches = limits(readings, start_s, end_s)
    loaded = [stretch for stretch in stretches if stretch[0] + start_s < issue_end_s]
    report: dict[str, Any] = {
        "kind": server.value,
        "readings": len(readings),
        "running_max": _most(during, Gauge.RUNNING),
        "running_mean": _mean(during, Gauge.RUNNING),
        "waiting_max": _most(during, Gauge.WAITING),
        "kv_usage_max": _most(during, Gauge.KV_USAGE),
        "kv_usage_mean": _mean(during, Gauge.KV_USAGE),
        "kv_capacity_tokens": last.gauges.get(Gauge.KV_CAPACITY_TOKENS),
        "max_num_seqs": last.gauges.get(Gauge.MAX_NUM_SEQS),
        "max_num_batched_tokens": last.gauges.get(Gauge.MAX_NUM_BATCHED_TOKENS),
        "prefix_hit_rate": _ratio(first, last, Counter.PREFIX_HITS, Counter.PREFIX_QUERIES),
        "preemptions": _grown(first, last, Counter.PREEMPTIONS),
        "generation_tokens": _grown(first, last, Counter.GENERATION_TOKENS),
        "prompt_tokens": _grown(first, last, Counter.PROMPT_TOKENS),
        "step_tokens_mean": _step_tokens(first, last),
        "limits": summarise_limits(loaded),
        "timeline": _timeline(shown, stretches, start_s),
    }
    hit_rate = report["prefix_hit_rate"]
    if hit_rate is not None and hit_rate >= _HIT_WORTH_SAYING:
        report["warning"] = (
            f"{hit_rate:.0%} of the prompt tokens came from the prefix cache: "
            "throughput and TTFT are those of a warm cache (--cache-bust makes prompts new)"
        )
    return report


def limits(readings: Sequence[Reading], start_s: float, end_s: float) -> list[tuple[float, float, str]]:
    """(from, to, what bound) for each stretch between readings within the run, in seconds after its start."""
    most_running = max((reading.gauges.get(Gauge.RUNNING, 0.0) for reading in readings), default=0.0)
    found = []
    for before, after in pairwise(readings):
        if after.time_s < start_s or before.time_s > end_s:
            continue
        found.append((before.time_s - start_s, after.time_s - start_s, _limit(before, after, most_running)))
    return found


def _limit(before: Reading, after: Reading, most_running: float) -> str:
    waiting = min(before.gauges.get(Gauge.WAITING, 0.0), after.gauges.get(Gauge.WAITING, 0.0))
    kv_usage = after.gauges.get(Gauge.KV_USAGE)
    if (_grown(before, after, Counter.PREEMPTIONS) or 0) > 0 or (
        waiting > 0 and kv_usage is not None and kv_usage >= _KV_FULL
    ):
        return "kv_blocks"
    budget = after.gauges.get(Gauge.MAX_NUM_BATCHED_TOKENS)
    step_tokens = _step_tokens(before, after)
    if budget and step_tokens is not None and step_tokens >= _STEP_FULL * budget:
        return "token_budget"
    if waiting > 0:
        running = after.gauges.get(Gauge.RUNNING, 0.0)
        cap = after.gauges.get(Gauge.MAX_NUM_SEQS)
        at_cap = running >= cap if cap else running == before.gauges.get(Gauge.RUNNING) == most_running
        return "max_num_seqs" if at_cap else "waiting"
    return "load"


def summarise_limits(stretches: Sequence[tuple[float, float, str]]) -> list[dict[str, Any]]:
    """Share of the time per limit, and when it was first and last seen (s after the start), the longest first."""
    total = sum(to_s - from_s for from_s, to_s, _ in stretches)
    result = []
    for name in {name for *_, name in stretches}:
        mine = [(from_s, to_s) for from_s, to_s, other in stretches if other == name]
        length = sum(to_s - from_s for from_s, to_s in mine)
        result.append(
            {
                "limit": name,
                "share": round(length / total, 4) if total > 0 else None,
                "first_s": round(max(0.0, mine[0][0]), 3),
                "last_s": round(mine[-1][1], 3),
            }
        )
    return sorted(result, key=lambda entry: (-(entry["share"] or 0.0), entry["limit"]))


def _timeline(
    during: Sequence[Reading], stretches: Sequence[tuple[float, float, str]], start_s: float
) -> dict[str, list[Any]]:
    step = max(1, len(during) // 600)
    kept = during[::step]
    by_end = {round(to_s, 6): name for _, to_s, name in stretches}
    return {
        "time_s": [round(reading.time_s - start_s, 3) for reading in kept],
        "running": [reading.gauges.get(Gauge.RUNNING) for reading in kept],
        "waiting": [reading.gauges.get(Gauge.WAITING) for reading in kept],
        "kv_usage": [reading.gauges.get(Gauge.KV_USAGE) for reading in kept],
        "limit": [by_end.get(round(reading.time_s - start_s, 6)) for reading in kept],
    }


def _most(readings: Sequence[Reading], gauge: Gauge) -> float | None:
    values = [reading.gauges[gauge] for reading in readings if gauge in reading.gauges]
    return max(values) if values else None


def _mean(readings: Sequence[Reading], gauge: Gauge) -> float | None:
    values = [reading.gauges[gauge] for reading in readings if gauge in reading.gauges]
    return round(sum(values) / len(values), 4) if values else None


def _grown(first: Reading, last: Reading, counter: Counter) -> float | None:
    before, after = first.counters.get(counter), last.counters.get(counter)
    if before is None or after is None:
        return None
    return after - before if after >= before else after  # the server was restarted in between


def _ratio(first: Reading, last: Reading, part: Counter, whole: Counter) -> float | None:
    hits, queries = _grown(first, last, part), _grown(first, last, whole)
    return round(hits / queries, 4) if hits is not None and queries else None


def _step_tokens(first: Reading, last: Reading) -> float | None:
    if last.step_tokens is None:
        return None
    grown = last.step_tokens.since(first.step_tokens)
    return None if grown is None else grown.mean
