"""Names and number formats of what a result says: the same in tables and on pages. Pure. Floor 3."""

from collections.abc import Mapping
from typing import Any

LATENCY_ROWS = (
    ("ttft_ms", "TTFT"),
    ("ttft_due_ms", "TTFT from due"),
    ("ttfo_ms", "TTFO (answer)"),
    ("tpot_ms", "TPOT"),
    ("gap_ms", "gap (pooled)"),
    ("max_gap_ms", "longest gap"),
    ("e2e_ms", "E2E"),
    ("client_queue_ms", "client queue"),
)


def describe_load(load: Mapping[str, Any]) -> str:
    """One phrase for a load."""
    if load["concurrency"]:
        text = f"closed loop, {load['concurrency']} at once"
    elif load["replay"]:
        text = "trace replay"
    else:
        arrivals = load["arrivals"]
        segments = arrivals["segments"]
        rates = f"{segments[0][0]:g}/s" if len(segments) == 1 and segments[0][0] == segments[0][1] else "changing rate"
        text = f"open loop, {arrivals['process']} {rates}"
    if load["max_in_flight"]:
        text += f", at most {load['max_in_flight']} in flight"
    return text


def says_nothing_new(key: str, summary: Mapping[str, Any]) -> bool:
    """Rows that repeat another: TTFO without reasoning, due without any wait."""
    if key == "ttfo_ms":
        return bool(summary["ttfo_ms"]["mean"] == summary["ttft_ms"]["mean"])
    if key in ("ttft_due_ms", "client_queue_ms"):
        return bool((summary["client_queue_ms"]["max"] or 0.0) < 1.0)
    return False


def milliseconds(value: float | None) -> str:
    """'0.52', '137', '2,480'; '-' for what is not known."""
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def number(value: float | None) -> str:
    """'7', '0.25', '1,204'."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def percent(value: float | None) -> str:
    """'12.5%'."""
    return "-" if value is None else f"{value:.1%}"


def slo_text(goodput: Mapping[str, Any]) -> str:
    """The limits of an SLO in a phrase."""
    return ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo"].items())
