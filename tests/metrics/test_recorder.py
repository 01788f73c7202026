import subprocess
import sys

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from kvctl.metrics.definitions import METRICS, TTFT_BUCKETS_S
from kvctl.metrics.recorder import HistogramSeries, InMemoryRecorder, PrometheusRecorder


def parse(page: bytes):
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def samples(page: bytes, name: str):
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(page).values()
        for sample in family.samples
        if sample.name.startswith(name)
    }


@given(st.lists(st.floats(0, 5000), max_size=60))
def test_a_histogram_counts_as_prometheus_own_does(values):
    ours = HistogramSeries(TTFT_BUCKETS_S)
    registry = CollectorRegistry()
    theirs = Histogram("h", "h", buckets=TTFT_BUCKETS_S, registry=registry)
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    expected = {s.labels["le"]: s.value for s in next(iter(registry.collect())).samples if s.name == "h_bucket"}
    assert dict(ours.cumulative()) == expected
    assert ours.count == len(values)
    assert ours.sum == pytest.approx(numpy.sum(values))


def test_a_value_may_be_counted_several_times_at_once():
    series = HistogramSeries((1.0, 2.0))
    series.observe(1.5, times=3)
    assert list(series.cumulative()) == [("1.0", 0), ("2.0", 3), ("+Inf", 3)]
    assert series.sum == 4.5


def test_a_counter_never_goes_down():
    counter = InMemoryRecorder().counter("vllm:prompt_tokens")
    counter.inc(3)
    with pytest.raises(ValueError, match="cannot go down"):
        counter.inc(-1)
    assert counter.value == 3


def test_the_same_labels_are_the_same_series():
    recorder = InMemoryRecorder()
    recorder.counter("vllm:request_success", finished_reason="stop").inc()
    recorder.counter("vllm:request_success", finished_reason="stop").inc()
    assert recorder.counter("vllm:request_success", finished_reason="stop").value == 2
    assert recorder.counter("vllm:request_success", finished_reason="length").value == 0


def test_a_name_or_label_that_is_not_in_the_table_is_refused():
    recorder = InMemoryRecorder()
    with pytest.raises(KeyError):
        recorder.counter("vllm:no_such_thing")
    with pytest.raises(KeyError):
        recorder.gauge("vllm:prompt_tokens")
    with pytest.raises(ValueError, match="labels"):
        recorder.counter("vllm:request_success")
    with pytest.raises(KeyError):
        recorder.counter("vllm:request_success", reason="stop")


def test_prometheus_reads_the_page_and_finds_every_family_with_its_kind():
    families = parse(PrometheusRecorder(model_name="m", max_model_len=8192).render())
    for name, definition in METRICS.items():
        assert families[name].type == definition.kind.value
        assert families[name].documentation == definition.help
    assert "process_resident_memory_bytes" in families


def test_known_label_values_are_there_before_anything_happened():
    page = PrometheusRecorder(model_name="m", max_model_len=8192).render()
    found = samples(page, "vllm:request_success")
    assert {dict(labels)["finished_reason"] for _, labels in found} == {
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    }
    assert set(found.values()) == {0.0}


def test_values_carry_model_and_engine_and_counters_end_in_total():
    recorder = PrometheusRecorder(model_name='org/"odd"\nname', engine="3", max_model_len=8192)
    recorder.counter("vllm:prompt_tokens").inc(7)
    recorder.histogram("vllm:time_to_first_token_seconds").observe(0.5)
    labels = frozenset({"model_name": 'org/"odd"\nname', "engine": "3"}.items())
    page = recorder.render()
    assert samples(page, "vllm:prompt_tokens_total") == {("vllm:prompt_tokens_total", labels): 7.0}
    assert samples(page, "vllm:time_to_first_token_seconds_sum") == {
        ("vllm:time_to_first_token_seconds_sum", labels): 0.5
    }


def test_two_recorders_share_nothing():
    one = PrometheusRecorder(model_name="a", max_model_len=100)
    two = PrometheusRecorder(model_name="b", max_model_len=100)
    one.counter("vllm:prompt_tokens").inc()
    assert set(samples(two.render(), "vllm:prompt_tokens_total").values()) == {0.0}


def test_the_engine_process_is_shown_beside_this_one():
    recorder = PrometheusRecorder(model_name="m", max_model_len=100)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        recorder.watch_engine_process(lambda: child.pid)
        page = recorder.render()
        child.communicate(b"\n")
    assert samples(page, "kvctl_engine_process_resident_memory_bytes")
    recorder.render()  # and a process that has ended is no error


def test_the_definitions_and_the_recorder_import_no_prometheus_client():
    code = "import sys, kvctl.metrics.recorder; print('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
