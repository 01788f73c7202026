"""The result object: counts, windows and shares on rows whose answers are known."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvctl.bench.collector import BINS_PER_S, Measurements
from kvctl.bench.definitions import DEFINITIONS
from kvctl.bench.result import build_errors, build_records, build_result, build_summary, build_timeline
from kvctl.bench.run_config import LoadConfig, ReportConfig, load_as_json
from kvctl.metrics.summary import Slo
from kvctl.workload.arrivals import ArrivalSpec
from tests.bench.test_request_table import ROW

CLOSED = LoadConfig(concurrency=2, num_requests=100, ramp_s=1.0)


def row(i, start_s, *, ttft_s=0.1, tokens=11, length_s=1.0, error="", prompt_tokens=50):
    return replace(
        ROW,
        number=i,
        class_name="",
        error_kind=error,
        due_s=start_s - 0.01,
        sent_s=start_s,
        first_s=start_s + ttft_s,
        first_answer_s=start_s + ttft_s,
        last_s=start_s + length_s,
        end_s=start_s + length_s,
        output_tokens=tokens,
        num_events=tokens,
        prompt_tokens=prompt_tokens,
        asked_prompt_tokens=50,
        reasoning_events=0,
    )


def measured_of(rows, *, start_s=100.0, ramp_s=1.0, issue_end_s=None):
    measured = Measurements(start_s=start_s, ramp_end_s=start_s + ramp_s)
    for one in rows:
        measured.rows.append(one)
        if one.error_kind:
            measured.errors[one.error_kind] += 1
        measured.tokens_per_bin[int(one.last_s * BINS_PER_S)] = (
            measured.tokens_per_bin.get(int(one.last_s * BINS_PER_S), 0) + one.output_tokens
        )
    measured.end_s = max(one.end_s for one in rows)
    measured.issue_end_s = issue_end_s or measured.end_s
    return measured


def two_streams(seconds):
    return [row(i, 100.0 + i // 2) for i in range(2 * seconds)]


def summary_of(measured, load=CLOSED, **report):
    return build_summary(measured, load, ReportConfig(**report))[0]


def test_counts_and_throughput_are_of_completed_requests():
    rows = [*two_streams(10), row(99, 103.0, error="cut")]
    summary = summary_of(measured_of(rows))
    assert (summary["completed"], summary["failed"]) == (20, 1)
    assert summary["request_throughput"] == pytest.approx(20 / 10)
    assert summary["output_throughput"] == pytest.approx(20 * 11 / 10)
    assert summary["total_throughput"] == pytest.approx(20 * 61 / 10)


def test_latencies_are_numpys_over_the_completed_rows():
    rng = np.random.default_rng(1)
    times = rng.gamma(3, 0.05, 300)
    rows = [row(i, 100.0 + i * 0.01, ttft_s=float(t), length_s=float(t) + 0.5) for i, t in enumerate(times)]
    told = summary_of(measured_of(rows))["ttft_ms"]
    assert told["p99"] == pytest.approx(np.percentile(times, 99) * 1e3, abs=1e-3)
    assert told["n"] == 300
    assert told["ci95"]["p50"][0] <= told["p50"] <= told["ci95"]["p50"][1]


def test_p99_of_few_requests_is_null():
    told = summary_of(measured_of(two_streams(10)))["ttft_ms"]
    assert (told["p99"], told["p90"] is not None) == (None, True)


def test_the_steady_window_leaves_ramp_and_drain_out():
    rows = two_streams(10)
    summary = summary_of(measured_of(rows, issue_end_s=108.0))
    steady = summary["steady"]
    assert (steady["start_s"], steady["end_s"]) == (1.1, 8.0)
    assert steady["mean_in_flight"] == pytest.approx(2.0, abs=0.01)
    assert summary["drain_s"] == pytest.approx(2.0)
    # answers end on whole seconds: 102 to 107 and, at the open end, not 108
    assert steady["output_throughput"] == pytest.approx(6 * 2 * 11 / 6.9, rel=1e-6)


def test_an_open_loop_is_steady_after_one_median_request():
    load = LoadConfig(arrivals=ArrivalSpec.steady(2.0), duration_s=10)
    steady = summary_of(measured_of(two_streams(10), issue_end_s=110.0), load)["steady"]
    assert steady["start_s"] == pytest.approx(1.1)


def test_a_run_too_short_for_a_window_has_none():
    summary = summary_of(measured_of([row(0, 100.0, length_s=0.5)]))
    assert summary["steady"] is None
    assert summary["request_throughput"] == pytest.approx(2.0)


def test_goodput_counts_failed_and_never_sent_requests_as_misses():
    measured = measured_of(
        [*(row(i, 100.0 + i, ttft_s=0.1 if i < 6 else 0.9) for i in range(8)), row(9, 104.0, error="cut")]
    )
    measured.num_never_sent = 3
    goodput = summary_of(measured, slo=Slo.parse("ttft=500ms"))["goodput"]
    assert (goodput["good"], goodput["all"]) == (6, 12)


def test_input_lengths_tell_how_exact_they_were():
    rows = [row(i, 100.0 + i, prompt_tokens=50 if i else 53) for i in range(4)]
    told = summary_of(measured_of(rows))["input_tokens"]
    assert (told["mean"], told["asked_mean"], told["exact_share"]) == (50.75, 50.0, 0.75)
    later_turn = replace(row(9, 105.0, prompt_tokens=500), asked_prompt_tokens=-1)
    told = summary_of(measured_of([*rows, later_turn]))["input_tokens"]
    assert (told["mean"], told["mean_where_asked"]) == (140.6, 50.75)
    unknown = summary_of(measured_of([row(0, 100.0, prompt_tokens=-1)]))["input_tokens"]
    assert unknown["mean"] is None


def test_classes_are_told_apart_when_there_are_several():
    rows = [replace(row(i, 100.0 + i, ttft_s=0.1 + 0.1 * (i % 2)), class_name="ab"[i % 2]) for i in range(10)]
    classes = summary_of(measured_of(rows))["classes"]
    assert classes["a"]["ttft_ms"]["p50"] == pytest.approx(100)
    assert classes["b"]["ttft_ms"]["p50"] == pytest.approx(200)


def test_nothing_completed_is_told_without_a_crash():
    summary = summary_of(measured_of([row(0, 100.0, error="http_500")]), slo=Slo.parse("ttft=1s"))
    assert (summary["completed"], summary["failed"], summary["ttft_ms"]["p50"]) == (0, 1, None)
    assert summary["goodput"]["share"] == 0.0


def test_the_timeline_covers_the_run_in_at_most_200_steps():
    timeline = build_timeline(measured_of([row(i, 100.0 + i) for i in range(1000)]))
    assert len(timeline["in_flight"]) <= 200
    assert sum(timeline["output_tokens_per_s"]) * timeline["step_s"] == pytest.approx(11 * 1000, rel=0.01)


def test_records_hold_every_request_and_its_event_times():
    measured = measured_of([row(0, 100.0), row(1, 101.0, error="cut")])
    measured.token_times_s[0] = [100.1, 100.2]
    records = build_records(measured)
    assert records[0]["event_times_ms"] == [pytest.approx(100.0), pytest.approx(200.0)]
    assert records[0]["ttft_ms"] == pytest.approx(100.0)
    assert records[1]["error"] == "cut"


def test_errors_are_told_by_kind_with_what_the_first_said():
    measured = measured_of([row(0, 100.0, error="cut")])
    measured.error_texts["cut"] = "closed"
    assert build_errors(measured) == {"cut": {"count": 1, "first": "closed"}}


PROMISED = {
    "completed", "failed", "duration_s", "request_throughput", "output_throughput", "total_throughput", "ttft_ms",
    "ttft_due_ms", "ttfo_ms", "tpot_ms", "gap_ms", "max_gap_ms", "e2e_ms", "tokens_per_event", "goodput",
}  # fmt: skip


def test_the_result_has_the_promised_fields_and_is_plain_json():
    measured = measured_of(two_streams(3))
    summary, _, latencies = build_summary(measured, CLOSED, ReportConfig())
    result = build_result({"load": load_as_json(CLOSED)}, summary, {}, None, measured, latencies, with_records=True)
    assert result["schema_version"] == 1
    assert set(summary) >= PROMISED
    assert set(summary["ttft_ms"]) >= {"mean", "p50", "p90", "p95", "p99", "n"}
    assert result["definitions"] == DEFINITIONS
    assert set(result) >= {"config", "definitions", "summary", "client", "server", "errors", "records", "timeline"}
    json.dumps(result, allow_nan=False)
