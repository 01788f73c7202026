import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl import errors
from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import AdmissionEvent, EngineOutput, SchedulerStats, StepResult, TokenLogprobs
from kvctl.engine import wire
from kvctl.errors import InvalidRequest, KvctlError
from tests.support.fakes import build_echo_core, engine_config


def payloads(data):
    return wire.FrameReader().feed(data)


def there(message):
    return wire.decode_to_engine(payloads(wire.encode_frame(message))[0])


def back(message):
    return wire.decode_from_engine(payloads(wire.encode_frame(message))[0])


PARAMS = SamplingParams(
    n=2,
    max_tokens=7,
    min_tokens=1,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    seed=-(2**63),
    logit_bias={3: -100.0, 0: 1.0},
    allowed_token_ids=(1, 2),
    bad_words_token_ids=((1,), (2, 3)),
    bad_words=("x",),
    stop=("é", "\n"),
    stop_token_ids=(5,),
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    logprobs=-1,
    prompt_logprobs=0,
)


def test_every_field_of_the_test_differs_from_its_default():
    default = SamplingParams()
    same = [f.name for f in dataclasses.fields(PARAMS) if getattr(PARAMS, f.name) == getattr(default, f.name)]
    assert same == []


def test_requests_cross_unchanged():
    request = wire.EngineRequest("é", [0, 2**31], PARAMS, 12.5, -3, "salt", frozenset({1, 2}))
    assert there(request) == request
    core = there(request).to_request()
    assert (core.request_id, core.token_ids, core.sampling_params) == ("é", [0, 2**31], PARAMS)
    assert (core.arrival_s, core.priority, core.cache_salt, core.eos_token_ids) == (12.5, -3, "salt", {1, 2})


def test_the_configuration_and_what_came_of_it_cross_unchanged():
    config = engine_config()
    assert there(wire.StartEngine(config)) == wire.StartEngine(config)
    _, info = build_echo_core(config, lambda: 0.0, lambda line: None)
    assert back(wire.EngineReady(info)).info == info


def test_steps_cross_unchanged():
    logprobs = TokenLogprobs([1, 2], [-0.5, float("-inf")], 7)
    outputs = [
        EngineOutput("a", [1, 2], FinishReason.STOP, "END", logprobs, [None, logprobs], 3, 4),
        EngineOutput("b", [1], FinishReason.LENGTH, 99),
        EngineOutput("c", []),
    ]
    stats = SchedulerStats(1, 2, {"kv_blocks": 2}, 3, 4, 5, 6, {"new": 1}, 7, 8, 9, 10, 0.5, 0.25)
    message = wire.StepDone(StepResult(outputs, stats, 1.5, [AdmissionEvent("a", 1.0)]))
    assert back(message) == message


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, KvctlError)]
)
def test_every_error_arrives_as_its_own_class(kind):
    sent = kind("what happened", hint="what to do")
    if isinstance(sent, InvalidRequest):
        sent.param = "prompt"
    got = back(wire.EngineFailed(wire.WireError.of(sent))).error.to_exception()
    assert type(got) is kind
    assert (got.message, got.hint, getattr(got, "param", None)) == (
        "what happened",
        "what to do",
        getattr(sent, "param", None),
    )


@pytest.mark.parametrize("name", ["NoSuchError", "re", "Any", "ClassVar", "__name__"])
def test_an_unknown_class_of_error_is_still_an_expected_error(name):
    assert type(wire.WireError(name, "m").to_exception()) is KvctlError


@given(st.lists(st.text(max_size=300), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_frames_come_out_whole_however_the_bytes_arrive(lines, cuts):
    data = b"".join(wire.encode_frame(wire.ReportLine(line)) for line in lines)
    reader, got, position = wire.FrameReader(), [], 0
    while position < len(data):
        size = cuts[position % len(cuts)]
        got += reader.feed(data[position : position + size])
        position += size
    assert [wire.decode_from_engine(payload).line for payload in got] == lines
