import asyncio
import re

import pytest

from kvctl.server import template_process
from tests.server.conftest import MODEL, connect
from tests.server.test_completions import stream

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def chat(client, **body):
    answer = await client.post(PATH, json={"messages": HI, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(context):
    return context.tokenizer.decode(context.engine.seen[-1][0], skip_special_tokens=False)


async def test_an_answer_has_one_message_per_choice(client, context):
    answer = await chat(client, max_tokens=5, n=2)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == MODEL
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "<user", "refusal": None}
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 10
    assert prompt_of(context) == "<user>hi</s><assistant>"


async def test_without_a_limit_the_answer_may_fill_the_context(client, context):
    await chat(client)
    seen_prompt, params, *_ = context.engine.seen[0]
    assert len(seen_prompt) + params.max_tokens == 256


async def test_max_completion_tokens_beats_max_tokens(client):
    answer = await chat(client, max_tokens=9, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_the_role_comes_with_the_first_chunk_of_each_choice(client):
    events = await stream(client, PATH, messages=HI, max_tokens=3, n=2, stream_options={"include_usage": True})
    deltas = [event["choices"][0] for event in events[:-1]]
    assert [d["index"] for d in deltas] == [0, 1] * 3
    assert all(d["delta"]["role"] == "assistant" for d in deltas[:2])
    assert not any("role" in d["delta"] for d in deltas[2:])
    assert "".join(d["delta"]["content"] for d in deltas if d["index"] == 0) == "<us"
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 6


async def test_text_parts_are_joined_and_other_fields_reach_the_template(client, context):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(client, messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert prompt_of(context).startswith("<user>a\nb")


async def test_the_generation_prompt_can_be_left_out(client, context):
    await chat(client, add_generation_prompt=False, max_tokens=1)
    assert prompt_of(context) == "<user>hi</s>"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_last_message_can_be_continued_and_echoed(client, context, is_streamed):
    messages = [*HI, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 1}
    if is_streamed:
        content = (await stream(client, PATH, **body))[0]["choices"][0]["delta"]["content"]
    else:
        content = (await chat(client, **body))["choices"][0]["message"]["content"]
    assert prompt_of(context).endswith("<assistant>I am")
    assert content == "I am<"


async def test_logprobs_have_openais_shape(client):
    answer = await chat(client, max_tokens=1, logprobs=True, top_logprobs=2)
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("<", -0.5, [60])
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [("<", -0.5), ("=", -1.5)]
    events = await stream(client, PATH, messages=HI, max_tokens=1, logprobs=True)
    assert events[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_and_token_ids_stand_beside_the_choices(client):
    answer = await chat(client, max_tokens=1, prompt_logprobs=0, return_token_ids=True)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["choices"][0]["token_ids"] == [60]


async def test_a_template_of_the_request_needs_the_operators_trust(client, make_context):
    body = {"messages": HI, "max_tokens": 1, "chat_template": "{{ messages[0]['content'] }}!{{ mark }}"}
    refused = await client.post(PATH, json=body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    context = make_context(trust_request_chat_template=True, default_chat_template_kwargs={"mark": "?"})
    async with connect(context) as trusting:
        await chat(trusting, **body)
    assert prompt_of(context) == "hi!?"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 10 ** 10 }}", "too much time or memory|MemoryError"),
        (
            "{% set x = namespace(s='a') %}{% for i in range(50) %}{% set x.s = x.s + x.s %}{% endfor %}",
            "too much time or memory|MemoryError",
        ),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "too much time"),
        ("{{ 9 ** (9 ** 9) }}", "too much time"),
        ("{{ raise_exception('not these') }}", "not these"),
        ("{% if %}", "not valid Jinja"),
    ],
    ids=["one-large-text", "doubling", "loops", "power", "refusal", "no-jinja"],
)
async def test_a_hostile_template_of_a_request_harms_nobody(make_context, monkeypatch, template, words):
    if words == "too much time":
        monkeypatch.setattr(template_process, "LIMIT_S", 2.0)
    context = make_context(trust_request_chat_template=True)
    async with connect(context) as client:
        hostile = asyncio.create_task(client.post(PATH, json={"messages": HI, "chat_template": template}))
        for _ in range(5):  # others are served meanwhile
            await chat(client, messages=HI, max_tokens=1)
        refused = await hostile
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    assert re.search(words, refused.json()["error"]["message"])


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "continue_final_message", "tokenize"])
async def test_template_kwargs_may_not_replace_what_has_a_field_of_its_own(client, name):
    refused = await client.post(PATH, json={"messages": HI, "chat_template_kwargs": {name: False}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template_kwargs"
    assert name in refused.json()["error"]["message"]


async def test_tools_are_shown_to_the_model_with_tool_choice_none(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await chat(client, tools=tools, tool_choice="none", max_tokens=1)
    refused = await client.post(PATH, json={"messages": HI, "tools": tools})
    assert refused.status_code == 501 and refused.json()["error"]["param"] == "tools"


async def test_arguments_of_earlier_tool_calls_are_objects_in_the_template(make_context):
    context = make_context(trust_request_chat_template=True)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    template = "{{ messages[0].tool_calls[0].function.arguments.x + 1 }}{{ messages[0].content }}"
    async with connect(context) as client:
        await chat(client, messages=messages, chat_template=template, max_tokens=1)
    assert prompt_of(context) == "2"
