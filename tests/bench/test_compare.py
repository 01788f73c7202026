"""Two results side by side: what differs, how surely, and what a pipeline may fail on."""

import json
import random

import pytest

from kvctl.bench.compare import compare_results, load_result, render_comparison
from kvctl.bench.result import build_result, build_summary
from kvctl.bench.run_config import ReportConfig, load_as_json
from kvctl.errors import ConfigError
from tests.bench.test_result import CLOSED, measured_of, row


def result_of(factor=1.0, seed=1, verdict="valid", model="m"):
    rng = random.Random(seed)
    rows = [row(i, 100.0 + i * 0.05, ttft_s=rng.gauss(0.1, 0.01) * factor, length_s=factor) for i in range(300)]
    measured = measured_of(rows)
    measured.gaps.add([0.01 * factor] * 100)
    summary, _, latencies = build_summary(measured, CLOSED, ReportConfig())
    config = {"load": load_as_json(CLOSED), "model": model, "endpoint": "/v1/completions", "workload": {"name": "w"}}
    client = {"verdict": verdict, "reason": "because"}
    return build_result(config, summary, client, None, measured, latencies, with_records=False)


def test_a_slower_run_differs_and_its_interval_says_by_how_much():
    entry = compare_results(result_of(), result_of(1.2, seed=2))["metrics"]["ttft_p50"]
    assert entry["differs"]
    assert entry["ci95"][0] < 1.2 < entry["ci95"][1]
    assert entry["ratio"] == pytest.approx(1.2, abs=0.02)


def test_two_runs_of_the_same_thing_do_not_differ():
    metrics = compare_results(result_of(), result_of(seed=5))["metrics"]
    assert metrics["ttft_p50"]["differs"] is False
    assert metrics["output_throughput"]["ci95"] is None


@pytest.mark.parametrize(
    ("condition", "fails"),
    [
        ("ttft_p99>+10%", True),
        ("ttft_p99>+30%", False),
        ("ttft_p50_ms>115", True),
        ("ttft_p50 > 130 ms", False),
        ("request_throughput<-50%", False),
        ("gap_p50>+10%", True),
        ("failed>0", False),
    ],
)
def test_conditions_fail_when_they_hold(condition, fails):
    found = compare_results(result_of(), result_of(1.2, seed=2), [condition])
    assert found["failed"] == ([condition] if fails else [])


@pytest.mark.parametrize("condition", ["ttft", "speed>3", "ttft_p98>1", "ttft_p50>x", ">3", "goodput<-5%"])
def test_a_condition_that_cannot_be_judged_is_refused(condition):
    with pytest.raises(ConfigError):
        compare_results(result_of(), result_of(), [condition])


def test_what_makes_a_comparison_unfair_is_said():
    warnings = compare_results(result_of(verdict="client_limited"), result_of(model="other"))["warnings"]
    assert any("before: the client was the limit" in text for text in warnings)
    assert any("differ in model" in text for text in warnings)


def test_files_that_are_no_results_are_refused(tmp_path):
    path = tmp_path / "r.json"
    for text in ("{", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 1, "points": []}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_result(path)
    for damage in ("summary", "client", "samples", "config"):
        path.write_text(json.dumps(result_of() | {damage: {}}))
        if damage != "samples":
            with pytest.raises(ConfigError, match="is damaged"):
                load_result(path)
    path.write_text(json.dumps(result_of() | {"summary": [], "samples": None}))
    with pytest.raises(ConfigError, match="is damaged"):
        load_result(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_result(tmp_path / "none.json")
    path.write_text(json.dumps(result_of()))
    assert load_result(path)["summary"]["completed"] == 300


def test_the_table_shows_changes_and_failures():
    from rich.console import Console

    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(render_comparison(compare_results(result_of(), result_of(1.2, seed=2), ["ttft_p50>+10%"])))
    text = captured.get()
    assert "differs" in text
    assert "FAILED: ttft_p50>+10%" in text
    assert "request_throughput" in text and "…" not in text
