"""Compares two results: the ratio of each metric with a 95 % interval, and conditions that a pipeline can fail on.

Reads result objects; runs nothing. Latencies are compared through their samples (bootstrap); throughputs have no
samples and so no interval. A difference is called one only when the interval leaves 1 out. Floor 3.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kvctl.bench.result import SCHEMA_VERSION
from kvctl.errors import ConfigError
from kvctl.metrics.summary import bootstrap_ratios, samples_needed

_LATENCIES = ("ttft", "ttft_due", "ttfo", "tpot", "gap", "max_gap", "e2e")
_STATISTICS = ("mean", "p50", "p90", "p95", "p99")
_SHOWN = ("p50", "p99")
_ROUNDS = 400  # of the bootstrap
_RATES = ("request_throughput", "output_throughput", "total_throughput", "goodput", "failed")
_CONDITION = re.compile(r"\s*([a-z0-9_]+?)(?:_ms)?\s*([<>])\s*([+-]?\d+(?:\.\d+)?)\s*(%|ms|)\s*\Z")


def load_result(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ConfigError: no file, no JSON, or not the result of one run.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON", hint="Give a file that kvctl bench --json has written.") from None
    if not isinstance(value, dict) or "schema_version" not in value:
        raise ConfigError(f"{path} is no result of kvctl bench", hint="--format vllm files cannot be compared.")
    if value["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(f"{path} has schema version {value['schema_version']}, this kvctl reads {SCHEMA_VERSION}")
    if "summary" not in value:
        raise ConfigError(f"{path} holds a sweep, not one run", hint="Compare files of single runs.")
    try:
        _touch_all(value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged: the comparison stops at {error}",
            hint="Give a file that kvctl bench --json has written.",
        ) from None
    return value


def _touch_all(value: Mapping[str, Any]) -> None:
    """Look at everything that a comparison reads, without its arithmetic."""
    _rates(value, value)
    _warnings(value, value)
    for name in _LATENCIES:
        value["samples"].get(f"{name}_ms")
        for statistic in _STATISTICS:
            value["summary"][f"{name}_ms"][statistic]


def compare_results(before: Mapping[str, Any], after: Mapping[str, Any], fail_if: Sequence[str] = ()) -> dict[str, Any]:
    """The comparison: metrics, warnings, and the conditions that hold.

    Raises:
        ConfigError: a condition that cannot be read.
    """
    conditions = [_parse_condition(text) for text in fail_if]
    metrics = _rates(before, after)
    for name in _LATENCIES:
        metrics |= _latency(before, after, name)
    failed = [text for text, condition in zip(fail_if, conditions, strict=True) if _holds(condition, metrics, text)]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "comparison",
        "metrics": metrics,
        "warnings": _warnings(before, after),
        "conditions": list(fail_if),
        "failed": failed,
    }


def _latency(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """One latency's statistics. An interval needs as many samples as the percentile itself."""
    samples = [result["samples"].get(f"{name}_ms") or [] for result in (before, after)]
    percents = [None if statistic == "mean" else float(statistic[1:]) for statistic in _STATISTICS]
    ratios = bootstrap_ratios(samples[0], samples[1], percents, rounds=_ROUNDS)
    found = {}
    for statistic, percent, ratio in zip(_STATISTICS, percents, ratios, strict=True):
        old, new = before["summary"][f"{name}_ms"][statistic], after["summary"][f"{name}_ms"][statistic]
        if old is None or new is None:
            continue
        is_enough = all(len(values) >= samples_needed(percent or 50) for values in samples)
        interval = [ratio[1], ratio[2]] if ratio is not None and is_enough else None
        found[f"{name}_{statistic}"] = {
            "before": old,
            "after": new,
            "ratio": new / old if old else None,
            "ci95": interval,
            "differs": None if interval is None else not interval[0] <= 1.0 <= interval[1],
        }
    return found


def _rates(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in _RATES:
        old, new = (_rate_of(result, name) for result in (before, after))
        if old is not None and new is not None:
            ratio = new / old if old else None
            found[name] = {"before": old, "after": new, "ratio": ratio, "ci95": None, "differs": None}
    return found


def _rate_of(result: Mapping[str, Any], name: str) -> float | None:
    summary = result["summary"]
    if name == "goodput":
        goodput = summary["goodput"]
        return None if goodput is None else goodput["share"]
    steady = summary["steady"]
    value = (steady if steady and name in steady else summary)[name]
    return None if value is None else float(value)


def _warnings(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    warnings = []
    for label, result in (("before", before), ("after", after)):
        if result["client"]["verdict"] != "valid":
            warnings.append(f"{label}: the client was the limit ({result['client']['reason']})")
        if result["interrupted"]:
            warnings.append(f"{label}: the run was interrupted")
    compared = ("model", "endpoint", "workload")
    warnings += [f"the two runs differ in {key}" for key in compared if before["config"][key] != after["config"][key]]
    loads = [
        {k: v for k, v in result["config"]["load"].items() if k not in ("seed", "warmup_requests")}
        for result in (before, after)
    ]
    if loads[0] != loads[1]:
        warnings.append("the two runs differ in load")
    return warnings


def _parse_condition(text: str) -> tuple[str, str, float, str]:
    match = _CONDITION.match(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no condition", hint="Write ttft_p99>+10%, output_throughput<-5% or tpot_p50>50ms."
        )
    name, sign, value, unit = match.groups()
    known = {*_RATES, *(f"{latency}_{statistic}" for latency in _LATENCIES for statistic in _STATISTICS)}
    if name not in known:
        raise ConfigError(f"{text!r} names no metric", hint=f"One of: {', '.join(sorted(known))}.")
    return name, sign, float(value), unit


def _holds(condition: tuple[str, str, float, str], metrics: Mapping[str, Mapping[str, Any]], text: str) -> bool:
    name, sign, limit, unit = condition
    entry = metrics.get(name)
    if entry is None:
        raise ConfigError(f"{text!r}: neither or only one of the results has {name}", hint="Too few samples?")
    value = entry["after"]
    if unit == "%":
        if entry["ratio"] is None:
            return bool(entry["after"] > 0) if sign == ">" else False
        value = (entry["ratio"] - 1) * 100
    return bool(value > limit) if sign == ">" else bool(value < limit)


def render_comparison(comparison: Mapping[str, Any]) -> Table:
    """The comparison as a table."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, justify in (("", "left"), ("before", "right"), ("after", "right"), ("change", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]  # both are what rich calls a JustifyMethod
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name, entry in comparison["metrics"].items():
        if name not in _RATES and not name.endswith(_SHOWN):
            continue
        interval = entry["ci95"]
        told = {True: "differs", False: "unclear", None: ""}[entry["differs"]]
        table.add_row(
            name if name in _RATES else f"{name} ms",
            f"{entry['before']:,.4g}",
            f"{entry['after']:,.4g}",
            "-" if entry["ratio"] is None else f"{entry['ratio'] - 1:+.1%}",
            "" if interval is None else f"{interval[0] - 1:+.1%} to {interval[1] - 1:+.1%}",
            told,
        )
    lines = [f"warning: {warning}" for warning in comparison["warnings"]]
    lines += [f"FAILED: {text}" for text in comparison["failed"]]
    if lines:
        table.caption = "\n".join(lines)
        table.caption_justify = "left"
    return table
