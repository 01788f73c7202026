"""What events mean: exact on the streams that other clients misread, on given moments."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.bench.stream_decoder import StreamDecoder


def completion(text, **more):
    return json.dumps({"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None}], **more}).encode()


def chat(delta, finish=None, **more):
    return json.dumps({"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}).encode()


def decoded(events, **options):
    """events: (moment in ms, payload)."""
    decoder = StreamDecoder(**options)
    decoder.decode([time_ms / 1e3 for time_ms, _ in events], [payload for _, payload in events])
    return decoder


USAGE_32 = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 32}}).encode()


def test_an_empty_role_delta_is_not_the_first_token():
    events = [
        (1, chat({"role": "assistant", "content": ""})),
        *((50 + 10 * i, chat({"content": "a"})) for i in range(32)),
    ]
    decoder = decoded(events)
    assert decoder.first_s == 0.050
    assert decoder.num_events == 32


def test_finish_and_usage_events_add_no_gap():
    events = [*((50 + 10 * i, chat({"content": "a"})) for i in range(32)), (360.1, chat({}, "stop")), (360.2, USAGE_32)]
    decoder = decoded([*events, (360.3, b"[DONE]")])
    assert len(decoder.gap_buckets) == 31
    assert decoder.gap_sum_s == pytest.approx(0.310)
    assert decoder.last_s == 0.360
    assert (decoder.finish_reason, decoder.is_done, decoder.output_tokens, decoder.prompt_tokens) == (
        "stop",
        True,
        32,
        9,
    )


def test_usage_told_with_the_finish_reason_is_no_token():
    last = chat({}, "stop", usage={"prompt_tokens": 9, "completion_tokens": 32})
    decoder = decoded([*((50 + 10 * i, chat({"content": "a"})) for i in range(32)), (360.1, last), (360.2, b"[DONE]")])
    assert (decoder.num_events, decoder.output_tokens, decoder.last_s) == (32, 32, 0.360)
    only = decoded([(70, chat({}, "length", usage={"completion_tokens": 1}))])  # its text was held back to the end
    assert (only.num_events, only.first_s) == (1, 0.070)


def test_a_last_token_without_text_is_seen_through_continuous_usage():
    events = [
        (50, completion("a", usage={"completion_tokens": 1})),
        (
            60,
            json.dumps(
                {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
            ).encode(),
        ),
    ]
    assert decoded(events).last_s == 0.060


def test_reasoning_counts_for_the_first_token_and_not_for_the_answer():
    events = [(50 + 10 * i, chat({"reasoning_content" if i < 16 else "content": "a"})) for i in range(32)]
    decoder = decoded(events)
    assert (decoder.first_s, decoder.first_answer_s) == (0.050, 0.210)
    assert decoder.reasoning_events == 16
    assert decoded([(50, chat({"reasoning": "b"}))]).first_s == 0.050


def test_tool_calls_are_tokens_of_the_answer():
    delta = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}
    assert decoded([(70, chat(delta))]).first_answer_s == 0.070


def test_continuous_usage_tells_the_tokens_of_the_first_event():
    events = [
        (50, completion(" a b c", usage={"completion_tokens": 3})),
        (90, completion(" d", usage={"completion_tokens": 4})),
    ]
    decoder = decoded(events)
    assert (decoder.first_event_tokens, decoder.output_tokens) == (3, 4)


def test_a_token_whose_text_is_held_back_is_seen_through_usage():
    events = [
        (50, completion("", usage={"completion_tokens": 1})),
        (60, completion("é", usage={"completion_tokens": 2})),
    ]
    assert decoded(events).first_s == 0.050
    assert decoded([(50, completion("")), (60, completion("é"))]).first_s == 0.060


def test_events_of_one_read_are_counted_as_coalesced():
    decoder = decoded([(50, completion("a")), (50, completion("b")), (60, completion("c"))])
    assert decoder.coalesced_events == 1
    assert decoder.max_gap_s == pytest.approx(0.010)


def test_an_error_in_mid_stream_is_told():
    decoder = decoded(
        [(50, completion("a")), (60, b'{"error": {"message": "engine died", "code": 500}}'), (61, b"[DONE]")]
    )
    assert decoder.error == "engine died"
    assert decoder.num_events == 1
    assert decoded([(1, b'{"error": "plain"}')]).error == "plain"


@pytest.mark.parametrize("payload", [b"<html>", b"{", b"3", b"[1]", b'{"choices": [3]}', b"\xff\xfe"])
def test_an_event_that_is_no_answer_is_malformed(payload):
    assert decoded([(1, payload)]).malformed is not None


@pytest.mark.parametrize(
    "payload",
    [
        b"{}",
        b'{"choices": null}',
        b'{"choices": [{}]}',
        b'{"choices": [{"delta": null}]}',
        b'{"usage": null, "choices": []}',
    ],
)
def test_an_event_without_anything_counts_for_nothing(payload):
    decoder = decoded([(1, payload)])
    assert (decoder.num_events, decoder.malformed, decoder.error) == (0, None, None)


def test_text_is_kept_where_it_is_wanted():
    events = [(1, chat({"content": "Hel"})), (2, chat({"content": 'lo "you"'})), (3, chat({}, "stop"))]
    assert "".join(decoded(events, keep_text=True).text) == 'Hello "you"'


@given(st.lists(st.text(max_size=12), min_size=1, max_size=30), st.booleans(), st.booleans())
def test_the_short_way_counts_as_the_long_one_does(texts, is_chat, ascii_only):
    """Whatever the texts hold, recognising an event by its surroundings finds what parsing each one finds."""
    payloads = [
        json.dumps(
            {"id": "text", "choices": [{"index": 0, "delta": {"content": t}} if is_chat else {"text": t}], "m": "x"},
            ensure_ascii=ascii_only,
        ).encode("utf-8", "surrogatepass")
        for t in texts
    ]
    try:
        [json.loads(payload) for payload in payloads]
    except UnicodeDecodeError:
        return
    decoder = StreamDecoder()
    decoder.decode([float(i + 1) for i in range(len(payloads))], payloads)
    assert decoder.num_events == sum(bool(text) for text in texts)
    assert decoder.malformed is None


@pytest.mark.parametrize("hostile", ['x","finish_reason":"stop","y":"', "tail\\", '\\"', '"'])
def test_text_that_looks_like_structure_does_not_fool_the_short_way(hostile):
    events = [(1, completion("plain")), (2, completion(hostile)), (3, completion("end"))]
    decoder = decoded(events)
    assert decoder.num_events == 3
    assert decoder.finish_reason is None
    assert decoder.malformed is None


def test_reasoning_and_answer_are_told_apart_on_the_short_way_too():
    deltas = [{"reasoning_content": "a"}] * 9 + [{"content": "a"}] * 5 + [{"reasoning_content": "b"}] * 3
    decoder = decoded([(10 * i, chat(delta)) for i, delta in enumerate(deltas, 1)])
    assert (decoder.num_events, decoder.reasoning_events, decoder.first_answer_s) == (17, 12, 0.1)
    assert len(decoder.gap_buckets) == 16


def test_a_finish_reason_after_the_same_beginning_is_seen():
    last = json.dumps({"id": "c", "choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}).encode()
    decoder = decoded([(1, completion("a")), (2, completion("c")), (3, last)])
    assert (decoder.num_events, decoder.finish_reason) == (3, "length")
