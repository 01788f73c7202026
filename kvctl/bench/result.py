"""Turns measurements into the result object: the JSON that is written, printed, compared and drawn. Pure.

Everything is told with its n; what is not known is null, never 0. Fields may be added within `schema_version` 1; none
is renamed or removed. Floor 3.

    config       what was asked for and found: url, model, endpoint, load, workload, request, slo, notes
    definitions  what each number means, in words
    summary      completed, failed, unfinished, duration_s, drain_s, request/output/total_throughput, input_tokens,
                 output_tokens, ttft_ms, ttft_due_ms, ttfo_ms, tpot_ms, gap_ms, max_gap_ms, e2e_ms, client_queue_ms
                 (each: mean, std, min, max, p50, p90, p95, p99, n, ci95), tokens_per_event, goodput, steady, classes,
                 max_in_flight
    client       timing, lag_ms, coalesced_share, late, never_sent, events, cpu_*, max_rss_mb, calibration, verdict,
                 reason
    server       kind, running/waiting/kv_usage, prefix_hit_rate, preemptions, limits, timeline, roofline; or null
    errors       by kind: count, what the first said
    samples      sorted latencies (at most 2000 each) and the CDF of gaps, for compare and plots
    timeline     output tokens/s and requests in flight over the run
    records      with --records: one object per request, with its event times
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvctl.bench.collector import BINS_PER_S, Measurements
from kvctl.bench.definitions import DEFINITIONS
from kvctl.bench.request_table import RequestRow
from kvctl.bench.run_config import LoadConfig, ReportConfig
from kvctl.metrics.log_histogram import LogHistogram
from kvctl.metrics.summary import Goodput, LatencySummary, percentile_interval, sketch, to_ms

SCHEMA_VERSION = 1
LATENCIES = ("ttft", "ttft_due", "ttfo", "tpot", "max_gap", "e2e", "client_queue")
_FEW = ("ttft", "tpot", "e2e")  # of the steady window and of each class


@dataclass(frozen=True)
class SteadyWindow:
    """The stretch of a run that is neither ramp nor drain (perf_counter seconds)."""

    start_s: float
    end_s: float
    rule: str

    @property
    def length_s(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def steady_window(measured: Measurements, load: LoadConfig, median_e2e_s: float | None) -> SteadyWindow | None:
    """Find the steady window, on whole tenths of a second; None when it holds less than two median requests."""
    start_s, rule = measured.ramp_end_s, "end of the ramp to first idle slot"
    if load.is_open:
        start_s = measured.start_s + (median_e2e_s or 0.0)
        rule = "one median E2E after the start to the end of the schedule"
    first, last = int(start_s * BINS_PER_S) + 1, int((measured.issue_end_s or measured.end_s) * BINS_PER_S)
    if last - first < max(2, 2 * (median_e2e_s or 0.0) * BINS_PER_S):
        return None
    return SteadyWindow(first / BINS_PER_S, last / BINS_PER_S, rule)


def build_summary(
    measured: Measurements, load: LoadConfig, report: ReportConfig
) -> tuple[dict[str, Any], SteadyWindow | None, dict[str, "array[float]"]]:
    """The `summary` object, the steady window, and the latencies (s) of completed requests by name."""
    tally = _Tally(report, has_classes=measured.rows.num_classes > 1)
    for row in measured.rows.rows():
        tally.add(row)
    latencies = tally.latencies
    e2e = LatencySummary.of(latencies["e2e"])
    window = steady_window(measured, load, e2e.percentile_s(50))
    duration_s = measured.end_s - measured.start_s
    summary: dict[str, Any] = {
        "completed": tally.num_completed,
        "failed": tally.num_rows - tally.num_completed,
        "unfinished": measured.num_unfinished,
        "duration_s": round(duration_s, 6),
        "drain_s": round(max(0.0, measured.end_s - measured.issue_end_s), 6) if measured.issue_end_s else None,
        "request_throughput": _per_s(tally.num_completed, duration_s),
        "output_throughput": _per_s(tally.output_tokens, duration_s),
        "total_throughput": _per_s(tally.output_tokens + tally.prompt_tokens, duration_s),
        "input_tokens": tally.input_tokens_as_json(),
        "output_tokens": tally.output_tokens_as_json(),
        "max_in_flight": measured.max_in_flight,
    }
    for name in LATENCIES:
        values = latencies[name]
        summary[f"{name}_ms"] = LatencySummary.of(values).as_json_ms() | {"ci95": _intervals(values)}
        if name == "tpot":
            summary["gap_ms"] = LatencySummary.of_histogram(measured.gaps).as_json_ms()
    summary["tokens_per_event"] = round(tally.output_tokens / tally.num_events, 4) if tally.num_events else None
    summary["goodput"] = tally.goodput_as_json(measured.num_never_sent, duration_s)
    summary["steady"] = _steady(measured, window)
    summary["classes"] = tally.classes_as_json()
    return summary, window, latencies


def _empty_latencies(names: Sequence[str] = LATENCIES) -> dict[str, "array[float]"]:
    return {name: array("d") for name in names}


def _add_latencies(found: Mapping[str, "array[float]"], values_s: Mapping[str, float | None]) -> None:
    for name, samples in found.items():
        value_s = values_s[name]
        if value_s is not None:
            samples.append(value_s)


def _latencies_of(row: RequestRow) -> dict[str, float | None]:
    return row.latencies_s() | {"client_queue": max(0.0, row.sent_s - row.due_s)}


class _Tally:
    """What is added up over all rows, in one pass: memory is eight bytes per latency."""

    def __init__(self, report: ReportConfig, *, has_classes: bool) -> None:
        self._slo = report.slo
        self._has_classes = has_classes
        self.latencies = _empty_latencies()
        self.num_rows = self.num_completed = self.num_events = self._num_good = 0
        self.output_tokens = 0.0
        self.prompt_tokens = self._cached_tokens = self._num_told = self._num_cached_told = 0
        self._asked_prompt_tokens = self._prompt_tokens_where_asked = self._num_asked = self._num_exact = 0
        self._asked_output_tokens = self._num_output_asked = 0
        self._classes: dict[str, dict[str, array[float]]] = {}

    def add(self, row: RequestRow) -> None:
        self.num_rows += 1
        if not row.is_completed:
            return
        self.num_completed += 1
        values_s = _latencies_of(row)
        _add_latencies(self.latencies, values_s)
        if self._has_classes:
            _add_latencies(self._classes.setdefault(row.class_name, _empty_latencies(_FEW)), values_s)
        if self._slo is not None and self._slo.is_met(values_s):
            self._num_good += 1
        self.num_events += row.num_events
        self.output_tokens += row.output_tokens
        if row.prompt_tokens >= 0:
            self._num_told += 1
            self.prompt_tokens += row.prompt_tokens
            if row.asked_prompt_tokens >= 0:
                self._num_asked += 1
                self._asked_prompt_tokens += row.asked_prompt_tokens
                self._prompt_tokens_where_asked += row.prompt_tokens
                self._num_exact += row.prompt_tokens == row.asked_prompt_tokens
        if row.cached_tokens >= 0:
            self._num_cached_told += 1
            self._cached_tokens += row.cached_tokens
        if row.asked_output_tokens > 0:
            self._num_output_asked += 1
            self._asked_output_tokens += row.asked_output_tokens

    def input_tokens_as_json(self) -> dict[str, Any]:
        asked, told = self._num_asked, self._num_told
        has_cached = self._num_cached_told and self.prompt_tokens
        return {
            "total": self.prompt_tokens if told else None,
            "mean": round(self.prompt_tokens / told, 3) if told else None,
            "asked_mean": round(self._asked_prompt_tokens / asked, 3) if asked else None,
            "mean_where_asked": round(self._prompt_tokens_where_asked / asked, 3) if asked else None,
            "exact_share": round(self._num_exact / asked, 4) if asked else None,
            "cached_share": round(self._cached_tokens / self.prompt_tokens, 4) if has_cached else None,
        }

    def output_tokens_as_json(self) -> dict[str, Any]:
        n, asked = self.num_completed, self._num_output_asked
        return {
            "total": round(self.output_tokens),
            "mean": round(self.output_tokens / n, 3) if n else None,
            "asked_mean": round(self._asked_output_tokens / asked, 3) if asked else None,
        }

    def goodput_as_json(self, num_never_sent: int, duration_s: float) -> dict[str, object] | None:
        if self._slo is None:
            return None
        return Goodput(self._num_good, self.num_rows + num_never_sent, duration_s, self._slo).as_json()

    def classes_as_json(self) -> dict[str, Any]:
        return {
            name: {f"{key}_ms": LatencySummary.of(found[key]).as_json_ms() for key in _FEW}
            for name, found in sorted(self._classes.items())
        }


def _intervals(values: Sequence[float]) -> dict[str, list[float | None] | None]:
    ordered = sorted(values)
    result: dict[str, list[float | None] | None] = {}
    for percent in (50, 99):
        interval = percentile_interval(ordered, percent)
        result[f"p{percent}"] = None if interval is None else [to_ms(interval[0]), to_ms(interval[1])]
    return result


def _per_s(amount: float, duration_s: float) -> float | None:
    return round(amount / duration_s, 6) if duration_s > 0 else None


def _steady(measured: Measurements, window: SteadyWindow | None) -> dict[str, Any] | None:
    if window is None:
        return None
    tokens = sum(
        amount
        for index, amount in measured.tokens_per_bin.items()
        if window.start_s * BINS_PER_S - 0.5 < index < window.end_s * BINS_PER_S - 0.5
    )
    latencies = _empty_latencies(_FEW)
    num_sent = num_ended = prompt_tokens = 0
    busy_s = 0.0
    for row in measured.rows.rows():
        if row.sent_s:
            busy_s += max(0.0, min(row.end_s, window.end_s) - max(row.sent_s, window.start_s))
        if row.is_completed and window.start_s <= row.sent_s <= window.end_s:
            num_sent += 1
            _add_latencies(latencies, _latencies_of(row))
        if row.is_completed and window.start_s <= row.end_s <= window.end_s:
            num_ended += 1
            prompt_tokens += max(row.prompt_tokens, 0)
    steady: dict[str, Any] = {
        "start_s": round(window.start_s - measured.start_s, 3),
        "end_s": round(window.end_s - measured.start_s, 3),
        "rule": window.rule,
        "requests_sent": num_sent,
        "mean_in_flight": round(busy_s / window.length_s, 3),
        "request_throughput": _per_s(num_ended, window.length_s),
        "output_throughput": _per_s(tokens, window.length_s),
        "total_throughput": _per_s(tokens + prompt_tokens, window.length_s),
    }
    for name in _FEW:
        steady[f"{name}_ms"] = LatencySummary.of(latencies[name]).as_json_ms()
    return steady


def build_samples(latencies: Mapping[str, Sequence[float]], gaps: LogHistogram) -> dict[str, Any]:
    """Sorted samples in ms (at most 2000 points each) for `compare` and plots; gaps as (ms, share up to it)."""
    samples: dict[str, Any] = {
        f"{name}_ms": [round(value * 1e3, 4) for value in sketch(values)]
        for name, values in latencies.items()
        if values and name != "client_queue"
    }
    points = list(gaps.cumulative())
    step = max(1, len(points) // 500)
    samples["gap_cdf"] = [
        [round(value * 1e3, 4), round(seen / gaps.count, 6)]
        for i, (value, seen) in enumerate(points)
        if i % step == 0 or i == len(points) - 1
    ]
    return samples


def build_timeline(measured: Measurements) -> dict[str, Any]:
    """Tokens per second and requests in flight over the run, in steps that give at most 200 points."""
    first = int(measured.start_s * BINS_PER_S)
    last = max(int(measured.end_s * BINS_PER_S), first + 1)
    width = max(1, -(-(last - first) // 200))
    steps = range(first, last, width)
    tokens = [sum(measured.tokens_per_bin.get(i, 0.0) for i in range(s, s + width)) for s in steps]
    in_flight: list[int] = []
    for s in steps:  # a step without a sample (the loop was busy) repeats the one before
        sampled = [measured.in_flight_per_bin[i] for i in range(s, s + width) if i in measured.in_flight_per_bin]
        in_flight.append(max(sampled) if sampled else in_flight[-1] if in_flight else 0)
    return {
        "step_s": width / BINS_PER_S,
        "start_s": round(first / BINS_PER_S - measured.start_s, 4),
        "output_tokens_per_s": [round(amount * BINS_PER_S / width, 3) for amount in tokens],
        "in_flight": in_flight,
    }


def build_records(measured: Measurements) -> list[dict[str, Any]]:
    """One object per request, times in ms after the start of the run."""
    records = []
    for row in measured.rows.rows():
        record: dict[str, Any] = {
            "number": row.number,
            "class": row.class_name or None,
            "error": row.error_kind or None,
            "due_ms": to_ms(row.due_s - measured.start_s),
            "sent_ms": to_ms(row.sent_s - measured.start_s) if row.sent_s else None,
            "connect_ms": to_ms(row.connect_s),
            "end_ms": to_ms(row.end_s - measured.start_s),
            "prompt_tokens": row.prompt_tokens if row.prompt_tokens >= 0 else None,
            "cached_tokens": row.cached_tokens if row.cached_tokens >= 0 else None,
            "output_tokens": round(row.output_tokens),
            "events": row.num_events,
        }
        record |= {f"{name}_ms": to_ms(value) for name, value in row.latencies_s().items()}
        times_s = measured.token_times_s.get(row.number)
        if times_s is not None:
            record["event_times_ms"] = [to_ms(time_s - measured.start_s) for time_s in times_s]
        records.append(record)
    return records


def build_errors(measured: Measurements) -> dict[str, Any]:
    """How many of each kind, and what the first of each said."""
    return {
        kind: {"count": count, "first": measured.error_texts.get(kind, "")}
        for kind, count in measured.errors.most_common()
    }


def build_result(
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    client: Mapping[str, Any],
    server: Mapping[str, Any] | None,
    measured: Measurements,
    latencies: Mapping[str, Sequence[float]],
    *,
    with_records: bool,
) -> dict[str, Any]:
    """The whole object of one run."""
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "config": dict(config),
        "definitions": DEFINITIONS,
        "summary": dict(summary),
        "client": dict(client),
        "server": None if server is None else dict(server),
        "errors": build_errors(measured),
        "interrupted": measured.interrupted,
        "stopped_by_errors": measured.stopped_by_errors,
        "samples": build_samples(latencies, measured.gaps),
        "timeline": build_timeline(measured),
    }
    if with_records:
        result["records"] = build_records(measured)
    return result
