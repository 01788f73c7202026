"""One measurement from beginning to end, and lengths cut to what a model can hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.bench.run_config import LoadConfig
from kvctl.bench.runner import BenchConfig, fit_to_model, measure, prepare
from kvctl.bench.terminal import SilentProgress
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.errors import ConfigError
from kvctl.workload.datasets import Dataset, TraceEntry
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session, Turn
from kvctl.workload.workload_profile import WorkloadClass, WorkloadProfile, load_profile


def choice(input_tokens, output_tokens, prefix_tokens=0):
    kind = WorkloadClass("a", input_tokens, output_tokens, prefix_groups=1, prefix_tokens=prefix_tokens)
    return WorkloadChoice(WorkloadProfile("p", (kind,)))


@given(
    st.tuples(st.integers(1, 3000), st.integers(0, 3000)),
    st.tuples(st.integers(1, 900), st.integers(0, 900)),
    st.integers(0, 500),
    st.integers(16, 4096),
)
def test_what_is_cut_fits_and_what_cannot_fit_is_refused(inputs, outputs, prefix, limit):
    given_input = LengthSpec("uniform", 500, low=inputs[0], high=sum(inputs))
    given_output = LengthSpec("uniform", 100, low=outputs[0], high=sum(outputs))
    workload = choice(given_input, given_output, prefix)
    can_fit = prefix + inputs[0] + outputs[0] <= limit
    if not can_fit:
        with pytest.raises(ConfigError):
            fit_to_model(workload, limit)
        return
    fitted, notes = fit_to_model(workload, limit)
    kind = fitted.profile.classes[0]
    assert prefix + kind.input_tokens.high + kind.output_tokens.high <= limit
    assert kind.input_tokens.low <= kind.input_tokens.high <= sum(inputs)
    assert kind.output_tokens.low <= kind.output_tokens.high <= sum(outputs)
    assert bool(notes) == (prefix + sum(inputs) + sum(outputs) > limit)


@pytest.mark.parametrize("name", ["chat", "rag", "agent", "code", "batch"])
def test_the_shipped_workloads_fit_a_model_of_8192_tokens(name):
    fit_to_model(WorkloadChoice(load_profile(name)), 8192)


def test_a_model_that_does_not_say_its_length_is_not_asked_to_fit():
    workload = choice(LengthSpec.fixed(10**6), LengthSpec.fixed(5))
    assert fit_to_model(workload, None) == (workload, ())


def test_a_whole_run_warms_up_apart_and_tells_its_lengths(mock_server):
    config = BenchConfig(
        url=mock_server(tokens=None, tokens_per_word=1.37, prompt_overhead_tokens=5),
        load=LoadConfig(concurrency=2, num_requests=6, warmup_requests=3, ramp_s=0.0),
        workload=choice(LengthSpec.fixed(200), LengthSpec.fixed(4)),
        calibrates=False,
        scrapes=True,
    )
    config = replace(config, workload=WorkloadChoice(replace(config.workload.profile, classes=(_plain(config),))))
    result, measured = measure(config, prepare(config, SilentProgress()), SilentProgress())
    assert len(measured.rows) == result["summary"]["completed"] == 6
    assert result["summary"]["input_tokens"]["mean"] == 200
    assert result["summary"]["input_tokens"]["exact_share"] == 1.0
    assert result["server"]["kind"] == "vLLM"
    assert result["client"]["calibration"] is None


def _plain(config):
    return replace(config.workload.profile.classes[0], prefix_groups=0)


def test_a_trace_with_prompts_that_the_model_refuses_is_told_before_the_run():
    entries = [TraceEntry(0.0, length, 10) for length in (50, 500, 5000)]
    workload = WorkloadChoice(dataset=Dataset("t.jsonl", "mooncake", entries))
    fitted, notes = fit_to_model(workload, 400)
    assert fitted == workload
    assert notes == ("2 of 3 requests are longer than the model's 400 tokens: it refuses them",)


def test_a_file_of_texts_is_not_warmed_up_with_its_own_texts():
    texts = WorkloadChoice(dataset=Dataset("t.jsonl", "jsonl", [Session((Turn("the text", 5),))]))
    warm = texts.for_warmup().sessions(PromptMaker(1))
    assert "the text" not in next(warm).turns[0].text
    trace = WorkloadChoice(dataset=Dataset("t.csv", "azure", [TraceEntry(0.0, 5, 5)]))
    assert trace.for_warmup() is trace


def test_a_warm_cache_that_only_usage_tells_of_is_noted(mock_server):
    config = BenchConfig(
        url=mock_server(prefix_cache=True),
        load=LoadConfig(concurrency=1, num_requests=4, ramp_s=0.0),
        workload=choice(LengthSpec.fixed(32), LengthSpec.fixed(4), prefix_tokens=64),
        calibrates=False,
        scrapes=False,
    )
    result, _ = measure(config, prepare(config, SilentProgress()), SilentProgress())
    assert any("warm cache" in note for note in result["config"]["notes"])


def test_fewer_requests_in_a_file_than_asked_for_are_noted(mock_server):
    dataset = Dataset("t.jsonl", "jsonl", [Session((Turn("the text", 5),))])
    load = LoadConfig(concurrency=1, num_requests=4, is_finite=True)
    config = BenchConfig(mock_server(), load, WorkloadChoice(dataset=dataset), calibrates=False)
    assert "1 requests, fewer than the 4" in prepare(config, SilentProgress()).notes[-1]
