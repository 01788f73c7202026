"""Says how far a result can be trusted: what the client added, and whether it was the limit.

Takes measurements and a calibration; decides by fixed rules, each with its reason in words. Pure. Floor 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.bench.collector import Measurements
from kvctl.bench.run_config import LoadConfig, ReportConfig
from kvctl.metrics.summary import LatencySummary, to_ms

_MAX_ERROR_SHARE = 0.10  # of a metric: beyond it the metric is the client's, not the server's
_MAX_COALESCED_SHARE = 0.05
_MAX_LATE_SHARE = 0.01
_FEW_LATE = 2  # so many are chance
_MIN_IN_FLIGHT_SHARE = 0.95
_MAX_CPU_SHARE = 0.90  # of a core per process


@dataclass(frozen=True)
class Calibration:
    """What this client made of the scripted server, at the same concurrency, just before the run."""

    concurrency: int
    events_per_s: float
    ttft_error_p50_s: float  # client minus what the server's log and the request's sending say
    ttft_error_p99_s: float
    ttft_truth_p50_s: float
    gap_error_share: float  # of the p50
    cpu_s_per_event: float
    coalesced_share: float
    duration_s: float

    def as_json(self) -> dict[str, Any]:
        """The calibration as the result tells it."""
        return {
            "concurrency": self.concurrency,
            "events_per_s": round(self.events_per_s),
            "ttft_error_ms": {"p50": to_ms(self.ttft_error_p50_s), "p99": to_ms(self.ttft_error_p99_s)},
            "gap_p50_error_percent": round(self.gap_error_share * 100, 3),
            "cpu_us_per_event": round(self.cpu_s_per_event * 1e6, 2),
            "saturates_at_events_per_s": round(1 / self.cpu_s_per_event) if self.cpu_s_per_event > 0 else None,
            "coalesced_share": round(self.coalesced_share, 5),
            "duration_s": round(self.duration_s, 3),
        }


def judge(
    measured: Measurements,
    summary: Mapping[str, Any],
    load: LoadConfig,
    report: ReportConfig,
    calibration: Calibration | None,
    num_workers: int = 1,
    users_think: bool = False,
) -> dict[str, Any]:
    """The `client` object of a result: lag, coalescing, lateness, calibration, verdict and reason."""
    lags = LatencySummary.of_histogram(measured.lags)
    harm_s = max(report.late_s, _MAX_ERROR_SHARE * (summary["ttft_ms"]["p50"] or 0.0) / 1e3)
    num_coalesced = num_gaps = num_sent = num_late = num_harmful = 0
    most_late_s = 0.0
    for row in measured.rows.rows():
        num_coalesced += row.coalesced_events
        num_gaps += max(0, row.num_events - 1)
        if row.sent_s:
            num_sent += 1
            late_s = row.sent_s - row.due_s - row.connect_s - row.place_wait_s
            num_late += late_s > report.late_s
            num_harmful += late_s > harm_s
            most_late_s = max(most_late_s, late_s)
    coalesced_share = num_coalesced / num_gaps if num_gaps else 0.0
    duration_s = max(measured.end_s - measured.start_s, 1e-9)
    cpu_share = measured.cpu_s / duration_s / num_workers
    reasons = _reasons(measured, summary, load, lags, coalesced_share, num_harmful, num_sent, cpu_share, calibration)
    if not users_think:
        reasons += _too_few_in_flight(measured, summary, load)
    return {
        "timing": "kernel" if measured.uses_kernel_clock else "read",
        "lag_ms": {"p50": to_ms(lags.percentile_s(50)), "p99": to_ms(lags.percentile_s(99)), "n": lags.n},
        "coalesced_share": round(coalesced_share, 5),
        "late": num_late,
        "late_max_ms": to_ms(most_late_s) if num_late else None,
        "never_sent": measured.num_never_sent,
        "connections": measured.num_connections,
        "events": measured.num_events,
        "events_per_s": round(measured.num_events / duration_s, 1),
        "cpu_us_per_event": round(measured.cpu_s / measured.num_events * 1e6, 2) if measured.num_events else None,
        "cpu_share": round(cpu_share, 4),
        "max_rss_mb": round(measured.max_rss_bytes / 1e6, 1),
        "workers": num_workers,
        "calibration": None if calibration is None else calibration.as_json(),
        "verdict": "client_limited" if reasons else "valid",
        "reason": "; ".join(reasons) if reasons else _good_reason(measured, lags, calibration),
    }


def _reasons(
    measured: Measurements,
    summary: Mapping[str, Any],
    load: LoadConfig,
    lags: LatencySummary,
    coalesced_share: float,
    num_late: int,
    num_sent: int,
    cpu_share: float,
    calibration: Calibration | None,
) -> list[str]:
    reasons = []
    lag_p99 = lags.percentile_s(99) or 0.0
    for name, label in (("ttft_ms", "TTFT"), ("gap_ms", "gap")):
        median_ms = summary[name]["p50"]
        if median_ms and not measured.uses_kernel_clock and lag_p99 * 1e3 > _MAX_ERROR_SHARE * median_ms:
            reasons.append(f"lag p99 {lag_p99 * 1e3:.2f} ms is over 10 % of the {label} p50 of {median_ms:.2f} ms")
    gap_ms = summary["gap_ms"]["mean"]
    if coalesced_share > _MAX_COALESCED_SHARE and gap_ms and lag_p99 * 1e3 > gap_ms:
        reasons.append(f"{coalesced_share:.0%} of the events were read together because this client was late")
    if load.is_open and load.max_in_flight is None and num_late > max(_FEW_LATE, _MAX_LATE_SHARE * num_sent):
        reasons.append(f"{num_late} of {num_sent} requests were sent too late to count as due")
    if cpu_share > _MAX_CPU_SHARE:
        reasons.append(f"this client used {cpu_share:.0%} of a core: more --workers or a faster machine")
    if calibration is not None:
        error_s = abs(calibration.ttft_error_p50_s)
        if error_s > _MAX_ERROR_SHARE * calibration.ttft_truth_p50_s:
            reasons.append(f"calibration: TTFT p50 was off by {error_s * 1e3:.2f} ms at this concurrency")
        if abs(calibration.gap_error_share) > _MAX_ERROR_SHARE:
            reasons.append(f"calibration: gap p50 was off by {calibration.gap_error_share:.0%} at this concurrency")
    return reasons


def _too_few_in_flight(measured: Measurements, summary: Mapping[str, Any], load: LoadConfig) -> list[str]:
    """A closed loop whose users do not think has as many requests in flight as users, but for failures."""
    steady = summary.get("steady")
    if load.concurrency is None or not steady or not steady["requests_sent"] or measured.errors:
        return []
    if steady["mean_in_flight"] / load.concurrency >= _MIN_IN_FLIGHT_SHARE:
        return []
    return [f"{steady['mean_in_flight']:.1f} in flight instead of {load.concurrency}"]


def _good_reason(measured: Measurements, lags: LatencySummary, calibration: Calibration | None) -> str:
    parts = []
    lag_p99 = lags.percentile_s(99)
    if measured.uses_kernel_clock:
        parts.append("arrivals are timed by the kernel")
    elif lag_p99 is not None:
        parts.append(f"this client added at most {lag_p99 * 1e3:.2f} ms at p99")
    if calibration is not None:
        parts.append(
            f"calibrated at {calibration.concurrency} streams, {calibration.events_per_s:,.0f} events/s: "
            f"TTFT p50 off by {calibration.ttft_error_p50_s * 1e3:+.2f} ms, gap p50 by "
            f"{calibration.gap_error_share:+.1%}"
        )
    return "; ".join(parts)
