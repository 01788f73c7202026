"""When a result may be trusted, and the reason in words when it may not."""

from dataclasses import replace

import pytest

from kvctl.bench.collector import Measurements
from kvctl.bench.result import build_summary
from kvctl.bench.run_config import LoadConfig, ReportConfig
from kvctl.bench.verdict import Calibration, judge
from kvctl.workload.arrivals import ArrivalSpec
from tests.bench.test_result import CLOSED, measured_of, row, two_streams

GOOD = Calibration(
    concurrency=2,
    events_per_s=200.0,
    ttft_error_p50_s=0.0001,
    ttft_error_p99_s=0.0005,
    ttft_truth_p50_s=0.05,
    gap_error_share=0.001,
    cpu_s_per_event=1e-5,
    coalesced_share=0.0,
    duration_s=1.9,
)
OPEN = LoadConfig(arrivals=ArrivalSpec.steady(2.0), duration_s=10)


def judged(measured, load=CLOSED, calibration=GOOD, **options):
    summary = build_summary(measured, load, ReportConfig())[0]
    return judge(measured, summary, load, ReportConfig(), calibration, **options)


def measured_with(**fields):
    measured = measured_of(two_streams(10))
    measured.gaps.add([0.01] * 1000)
    measured.num_events = 1000
    measured.uses_kernel_clock = True
    for name, value in fields.items():
        setattr(measured, name, value)
    return measured


def test_a_quiet_client_is_valid_and_says_what_it_was_calibrated_at():
    told = judged(measured_with())
    assert told["verdict"] == "valid"
    assert "kernel" in told["reason"]
    assert "2 streams" in told["reason"]
    assert told["calibration"]["saturates_at_events_per_s"] == 100_000


@pytest.mark.parametrize("uses_kernel", [True, False])
def test_lag_counts_only_where_it_is_in_the_latencies(uses_kernel):
    measured = measured_with(uses_kernel_clock=uses_kernel)
    measured.lags.add([0.02] * 100)
    told = judged(measured)
    assert told["lag_ms"]["p99"] == pytest.approx(20, rel=1e-3)
    assert told["verdict"] == ("valid" if uses_kernel else "client_limited")
    if not uses_kernel:
        assert "lag p99" in told["reason"]


def test_events_read_together_because_the_client_was_late_are_told():
    rows = [replace(one, coalesced_events=5) for one in two_streams(10)]
    measured = measured_of(rows)
    measured.uses_kernel_clock = True
    measured.gaps.add([0.01] * 100)
    assert judged(measured)["verdict"] == "valid"  # the server wrote them together: nothing was late here
    measured.lags.add([0.03] * 100)
    told = judged(measured)
    assert told["verdict"] == "client_limited"
    assert "read together" in told["reason"]


def test_requests_sent_late_spoil_an_open_loop_and_are_counted():
    rows = [replace(row(i, 100.0 + i * 0.1), due_s=100.0 + i * 0.1 - 0.03, connect_s=0.0) for i in range(50)]
    told = judged(measured_of(rows), OPEN)
    assert (told["late"], told["verdict"]) == (50, "client_limited")
    waited = judged(measured_of([replace(one, place_wait_s=0.03) for one in rows]), OPEN)
    assert (waited["late"], waited["verdict"]) == (0, "valid")
    capped = replace(OPEN, max_in_flight=4)
    assert judged(measured_of(rows), capped)["verdict"] == "valid"  # waiting under a cap was asked for


def test_fewer_streams_than_asked_for_are_told():
    load = replace(CLOSED, concurrency=4)
    told = judged(measured_of(two_streams(10)), load)
    assert "2.0 in flight instead of 4" in told["reason"]
    assert judged(measured_of(two_streams(10)), load, users_think=True)["verdict"] == "valid"


def test_a_full_core_is_told():
    assert "of a core" in judged(measured_with(cpu_s=9.9))["reason"]


@pytest.mark.parametrize(
    ("change", "told"),
    [({"ttft_error_p50_s": 0.01}, "TTFT p50 was off"), ({"gap_error_share": -1.0}, "gap p50 was off")],
)
def test_a_bad_calibration_is_told(change, told):
    assert told in judged(measured_with(), calibration=replace(GOOD, **change))["reason"]


def test_nothing_measured_is_judged_without_a_crash():
    told = judged(measured_of([row(0, 100.0, error="cut")]), calibration=None)
    assert told["cpu_us_per_event"] is None
    assert told["calibration"] is None


def test_measurements_of_several_processes_add_up():
    one, other = measured_with(), measured_of(two_streams(12), start_s=99.5)
    merged = Measurements(start_s=one.start_s, issue_end_s=one.issue_end_s)
    for part in (one, other):
        merged.merge(part)
    assert len(merged.rows) == 44
    assert merged.start_s == 99.5
    assert merged.end_s == other.end_s
