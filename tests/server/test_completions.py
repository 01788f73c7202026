import json

import pytest

from kvctl.server.sampling_defaults import SamplingDefaults
from tests.server.conftest import MODEL, connect


async def complete(client, **body):
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def read_events(text):
    """The JSON objects of a stream; its end must be [DONE]."""
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def stream(client, path="/v1/completions", **body):
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return read_events(answer.text)


async def test_the_default_is_sixteen_tokens(client):
    answer = await complete(client, model=MODEL, prompt="abc")
    assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-") and answer["model"] == MODEL
    [choice] = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "abcabcabcabcabca",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_cached_tokens_are_told(client):
    answer = await complete(client, prompt="x" * 40)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_what_a_first_choice_computed_does_not_read_as_cached_to_the_next(client, context, is_streamed):
    original = context.engine.generate

    async def with_hits(*args, **kwargs):
        async for output in original(*args, **kwargs):
            output.num_cached_tokens = 16 * output.index  # the later ones find the first one's blocks
            yield output

    context.engine.generate = with_hits
    body = {"prompt": ["x" * 40, "y" * 40], "n": 3, "max_tokens": 2}
    if is_streamed:
        usage = (await stream(client, **body, stream_options={"include_usage": True}))[-1]["usage"]
    else:
        usage = (await complete(client, **body))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd", "ef"], ["ab", "cd", "ef"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99, 100]], ["ab", "cd"]),
    ],
)
async def test_a_prompt_is_text_or_ids_or_several_of_one_kind(client, prompt, texts):
    answer = await complete(client, prompt=prompt, max_tokens=2)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    assert answer["usage"]["prompt_tokens"] == 2 * len(texts) == answer["usage"]["completion_tokens"]


async def test_n_choices_of_each_prompt_are_numbered_prompt_by_prompt(client):
    answer = await complete(client, prompt=["a", "b"], n=3, max_tokens=1)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate("aaabbb"))
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 2


async def test_a_stream_says_what_the_whole_answer_says(client):
    whole = await complete(client, prompt=["ab", "héé"], n=2, max_tokens=7)
    events = await stream(client, prompt=["ab", "héé"], n=2, max_tokens=7, stream_options={"include_usage": True})
    texts = [""] * 4
    for event in events[:-1]:
        [choice] = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert events[-1]["choices"] == [] and events[-1]["usage"] == whole["usage"]
    assert {event["id"] for event in events} == {events[0]["id"]} and events[0]["object"] == "text_completion"
    assert sum(event["choices"][0]["finish_reason"] == "length" for event in events[:-1]) == 4


async def test_usage_comes_with_every_chunk_where_asked_for(client):
    events = await stream(
        client, prompt="ab", max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True}
    )
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    assert all(event["usage"]["prompt_tokens"] == 2 for event in events)


async def test_without_include_usage_no_usage_is_sent(client):
    assert not any("usage" in event for event in await stream(client, prompt="ab", max_tokens=3))


async def test_the_operator_can_force_usage(make_context):
    async with connect(make_context(force_include_usage=True)) as client:
        assert (await stream(client, prompt="ab", max_tokens=1))[-1]["usage"]["total_tokens"] == 3


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_repeats_the_prompt_and_its_logprobs(client, is_streamed):
    body = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1}
    if is_streamed:
        [choice] = (await stream(client, **body))[0]["choices"]
    else:
        [choice] = (await complete(client, **body))["choices"]
    assert choice["text"] == "aba"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "a"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5] and logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"b": -0.5}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_echo_of_no_tokens_is_the_prompt_alone(client, context, is_streamed):
    body = {"prompt": [104, 105], "max_tokens": 0, "echo": True, "stream": is_streamed, "logprobs": 0}
    if is_streamed:
        events = await stream(client, **body, stream_options={"include_usage": True})
        assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hi"
        usage, choice = events[-1]["usage"], events[0]["choices"][0]
    else:
        answer = await complete(client, **body)
        usage, choice = answer["usage"], answer["choices"][0]
        assert choice["text"] == "hi"
    assert choice["finish_reason"] == "length" and choice["logprobs"]["tokens"] == ["h", "i"]
    assert usage["completion_tokens"] == 0
    assert context.engine.num_unfinished == 0


async def test_logprobs_of_a_stream_keep_counting_the_offset(client):
    events = await stream(client, prompt="ab", max_tokens=3, logprobs=2)
    assert [event["choices"][0]["logprobs"]["text_offset"] for event in events] == [[0], [1], [2]]
    assert events[0]["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.5}]


async def test_many_prompt_logprobs_are_written_as_few_are(client):
    body = {"max_tokens": 2, "prompt_logprobs": 20, "logprobs": 20}
    [few] = (await complete(client, prompt="ab", **body))["choices"]
    [many] = (await complete(client, prompt="ab" * 100, **body))["choices"]  # over the limit of what is written inline
    assert many["prompt_logprobs"][:2] == few["prompt_logprobs"] and len(many["prompt_logprobs"]) == 200
    assert many["logprobs"] == few["logprobs"]


async def test_prompt_logprobs_have_rank_and_text_per_token_id(client):
    [choice] = (await complete(client, prompt="ab", max_tokens=1, prompt_logprobs=1))["choices"]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


async def test_token_ids_come_back_where_asked_for(client):
    [choice] = (await complete(client, prompt="ab", max_tokens=3, return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == [97, 98] and choice["token_ids"] == [97, 98, 97]
    events = await stream(client, prompt="ab", max_tokens=2, return_token_ids=True)
    assert events[0]["choices"][0]["prompt_token_ids"] == [97, 98]
    assert [event["choices"][0]["token_ids"] for event in events] == [[97], [98]]


async def test_tokens_can_be_named_by_id(client):
    [choice] = (await complete(client, prompt="ab", max_tokens=1, logprobs=1, return_tokens_as_token_ids=True))[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == ["token_id:97"]


async def test_sampling_fields_reach_the_engine(client, context):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    await complete(
        client,
        prompt="ab",
        max_tokens=4,
        stop="x",
        stop_token_ids=[3],
        bad_words=["no"],
        allowed_token_ids=[1, 2],
        logit_bias={"5": 1.5},
        priority=-3,
        cache_salt="salt",
        **fields,
    )
    _, params, priority, salt = context.engine.seen[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.stop == ("x",) and params.stop_token_ids == (3,) and params.bad_words == ("no",)
    assert params.allowed_token_ids == (1, 2) and params.logit_bias == {5: 1.5}
    assert (priority, salt) == (-3, "salt")


async def test_the_users_value_beats_the_models_generation_config_beats_the_default(make_context):
    defaults = SamplingDefaults.from_generation_config({"temperature": 0.6, "top_k": 20, "max_new_tokens": 5})
    context = make_context(defaults=defaults)
    async with connect(context) as client:
        await complete(client, prompt="a", top_k=3)
    params = context.engine.seen[0][1]
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.6, 3, 1.0, 5)


async def test_prompts_share_their_sampling_where_they_have_the_same_room(client, context):
    """Each has lists of up to the vocabulary's length: they are read once."""
    await complete(client, prompt=["a", "b", "x" * 250, "c"], max_tokens=10, allowed_token_ids=list(range(250)))
    params = [seen[1] for seen in context.engine.seen]
    assert [p.max_tokens for p in params] == [10, 10, 6, 10]
    assert params[0] is params[1] is params[3]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 200, "n": 16_384}, "n"),
        ({"prompt": ["a"] * 1024, "allowed_token_ids": [1] * 259, "n": 9}, "n"),
    ],
)
async def test_what_all_choices_together_send_to_the_engine_is_bounded(client, context, body, param):
    answer = await client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and "over 2,097,152" in error["message"]
    assert not context.engine.seen


async def test_too_many_output_tokens_are_clamped_to_the_model_length(client, context):
    answer = await complete(client, prompt="x" * 250, max_tokens=200)
    assert context.engine.seen[0][1].max_tokens == 6
    assert answer["usage"]["total_tokens"] == 256


@pytest.mark.parametrize(
    ("limit", "side", "kept"), [(3, None, "fgh"), (3, "right", "abc"), (-1, None, "abcdefgh"), (8, None, "abcdefgh")]
)
async def test_long_prompts_are_cut_where_asked_for(client, context, limit, side, kept):
    await complete(client, prompt="abcdefgh", truncate_prompt_tokens=limit, truncation_side=side, max_tokens=1)
    assert bytes(context.engine.seen[0][0]).decode() == kept


async def test_cutting_to_minus_one_leaves_room_for_the_output(client, context):
    answer = await complete(client, prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=56)
    assert answer["usage"]["prompt_tokens"] == 200 and answer["usage"]["completion_tokens"] == 56


async def test_cutting_to_minus_one_leaves_room_for_a_token_where_no_limit_is_given(client):
    body = {"messages": [{"role": "user", "content": "x" * 1000}], "truncate_prompt_tokens": -1}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["total_tokens"] == 256


async def test_the_request_id_of_header_or_body_names_the_answer(client, make_context):
    assert (await complete(client, prompt="a", request_id="mine"))["id"] == "cmpl-mine"
    answer = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "theirs"})
    assert answer.json()["id"] == "cmpl-theirs"


async def test_choosing_the_best_of_many_is_refused_not_dropped(client):
    refused = await client.post("/v1/completions", json={"prompt": "a", "n": 2, "best_of": 5})
    assert refused.status_code == 501 and refused.json()["error"]["param"] == "best_of"
    answer = await complete(client, prompt="a", n=2, best_of=2, max_tokens=1)
    assert len(answer["choices"]) == 2


async def test_unknown_fields_are_ignored(client):
    await complete(client, prompt="a", some_future_field={"x": [1]})


async def test_whole_numbers_may_be_written_as_floats(client):
    answer = await client.post(
        "/v1/completions",
        content='{"prompt":"a","max_tokens":2.0,"n":1.0}',
        headers={"content-type": "application/json"},
    )
    assert answer.json()["usage"]["completion_tokens"] == 2
