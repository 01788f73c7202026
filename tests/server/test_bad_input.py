"""Every wrong request gets its status, type and param; nothing is started for it and nothing is left behind."""

import json

import pytest
from pydantic import ValidationError

from kvctl.server.protocol import ChatCompletionRequest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BAD, BODY = "BadRequestError", "Bad Request"

CASES = [
    # path, body, status, type, param, in the message
    (COMPLETIONS, {}, 400, BODY, "prompt", "required"),
    (COMPLETIONS, {"prompt": ""}, 400, BAD, "prompt", "empty"),
    (COMPLETIONS, {"prompt": []}, 400, BODY, "prompt", "at least 1"),
    (COMPLETIONS, {"prompt": [[]]}, 400, BODY, "prompt.0", "at least 1"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, BAD, "prompt", "empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, BODY, "prompt.1", ""),
    (COMPLETIONS, {"prompt": [1, True]}, 400, BODY, "prompt.1", ""),
    (COMPLETIONS, {"prompt": [-1]}, 400, BODY, "prompt.0", ""),
    (COMPLETIONS, {"prompt": [259]}, 400, BAD, "prompt", "vocabulary"),
    (COMPLETIONS, {"prompt": [2**70]}, 400, None, None, ""),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, 400, BODY, "prompt", "1024"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, 400, BODY, "prompt", ""),
    (COMPLETIONS, {"prompt": None}, 400, BODY, "prompt", ""),
    (COMPLETIONS, {"prompt": "x" * 256}, 400, BAD, "input_tokens", "256 tokens"),
    (COMPLETIONS, {"prompt": "x" * 70_000}, 400, BAD, "input_text", "70000 characters"),
    (COMPLETIONS, {"prompt": "a", "model": "nope"}, 404, "NotFoundError", "model", "stub-model, alias"),
    (COMPLETIONS, {"prompt": "a", "model": 3}, 400, BODY, "model", "string"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, BAD, "max_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, BODY, "max_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 257}, 400, BAD, "max_tokens", "257"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "16"}, 400, BODY, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1.5}, 400, BODY, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": True}, 400, BODY, "max_tokens", "integer"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 17}, 400, BAD, "min_tokens", "max_tokens = 16"),
    (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, 400, BAD, "temperature", "-0.1"),
    (COMPLETIONS, {"prompt": "a", "temperature": 2.1}, 400, BAD, "temperature", "2.1"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, BODY, "temperature", "number"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, BAD, "top_p", "(0, 1]"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.01}, 400, BAD, "top_p", "1.01"),
    (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, 400, BAD, "min_p", ""),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, BAD, "top_k", "-2"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.5}, 400, BODY, "top_k", ""),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 3}, 400, BAD, "presence_penalty", ""),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": -3}, 400, BAD, "frequency_penalty", ""),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, 400, BAD, "repetition_penalty", ""),
    (COMPLETIONS, {"prompt": "a", "seed": 2**63}, 400, BODY, "seed", ""),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, BODY, "n", ""),
    (COMPLETIONS, {"prompt": "a", "n": 16385}, 400, BODY, "n", ""),
    (COMPLETIONS, {"prompt": ["a"] * 100, "n": 1000}, 400, BAD, "n", "100000"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, 400, BAD, "n", "greedy"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, BAD, "stop", "empty"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, 400, BAD, "stop", "empty"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", 1]}, 400, BODY, "stop.1", ""),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 65}, 400, BAD, "stop", "64"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, 400, BAD, "stop_token_ids", "999"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [999]}, 400, BAD, "allowed_token_ids", "999"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1] * 300}, 400, BAD, "allowed_token_ids", "300 ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, 400, BAD, "allowed_token_ids", "empty"),
    (CHAT, {"messages": HI * 257}, 400, BAD, "messages", "257 messages"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 600}]},
        400,
        BAD,
        "messages",
        "600 parts",
    ),
    (COMPLETIONS, {"prompt": "a", "bad_words": [""]}, 400, BAD, "bad_words", "empty"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, BAD, "logit_bias", "'x'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"999": 1}}, 400, BAD, "logit_bias", "999"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"-1": 1}}, 400, BAD, "logit_bias", ""),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, 400, BAD, "logit_bias[1]", "101"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, 400, BODY, "logit_bias", "bias of 1"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": True}}, 400, BODY, "logit_bias", "bias of 1"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 10**400}}, 400, None, None, ""),
    (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, 400, None, None, ""),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, BAD, "logprobs", "20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -1}, 400, BAD, "logprobs", "20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -2}, 400, BAD, "logprobs", "-2"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, 400, BODY, "logprobs", ""),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 21}, 400, BAD, "prompt_logprobs", ""),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, 400, BAD, "prompt_logprobs", "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {}}, 400, BAD, "stream_options", "stream"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, BODY, "stream", ""),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, 400, BAD, "truncate_prompt_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 257}, 400, BAD, "truncate_prompt_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": -2}, 400, BODY, "truncate_prompt_tokens", ""),
    (COMPLETIONS, {"prompt": "a", "truncation_side": "middle"}, 400, BODY, "truncation_side", ""),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, 400, BODY, "cache_salt", ""),
    (COMPLETIONS, {"prompt": "a", "cache_salt": "x" * 1025}, 400, BODY, "cache_salt", ""),
    (COMPLETIONS, {"prompt": "a", "priority": 1.5}, 400, BODY, "priority", ""),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 501, "NotImplementedError", "suffix", "filling in"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True}, 501, "NotImplementedError", "use_beam_search", ""),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "a"}}, 501, None, "structured_outputs", ""),
    (COMPLETIONS, {"prompt": "a", "guided_choice": ["a"]}, 501, None, "guided_choice", ""),
    (COMPLETIONS, {"prompt": "a", "prompt_embeds": "AAAA"}, 501, None, "prompt_embeds", ""),
    (
        COMPLETIONS,
        {"prompt": "a", "n": 2, "echo": True, "logprobs": 1, "stream": True},
        501,
        "NotImplementedError",
        "echo",
        "",
    ),
    (CHAT, {}, 400, BODY, "messages", "required"),
    (CHAT, {"messages": []}, 400, BODY, "messages", ""),
    (CHAT, {"messages": "hi"}, 400, BODY, "messages", ""),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, BODY, "messages.0.role", "required"),
    (CHAT, {"messages": [{"role": "", "content": "hi"}]}, 400, BODY, "messages.0.role", ""),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, BODY, "messages.0.content", ""),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, BAD, "max_tokens", ""),
    (CHAT, {"messages": HI, "max_completion_tokens": 999}, 400, BAD, "max_completion_tokens", ""),
    (CHAT, {"messages": HI, "top_logprobs": 2}, 400, BAD, "top_logprobs", ""),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, 400, BAD, "top_logprobs", ""),
    (CHAT, {"messages": HI, "logprobs": 1}, 400, BODY, "logprobs", ""),
    (CHAT, {"messages": HI, "tools": []}, 400, BAD, "tools", "empty"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 501, None, "tool_choice", ""),
    (CHAT, {"messages": HI, "tool_choice": "sometimes"}, 400, BAD, "tool_choice", ""),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, 501, None, "response_format", ""),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 501, None, "response_format", ""),
    (CHAT, {"messages": HI, "response_format": 7}, 501, None, "response_format", ""),
    (CHAT, {"messages": HI, "modalities": ["audio"]}, 501, None, "modalities", ""),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"tools": 1}}, 400, BAD, "chat_template_kwargs", ""),
    (
        CHAT,
        {"messages": HI, "continue_final_message": True, "add_generation_prompt": True},
        400,
        BAD,
        "continue_final_message",
        "",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        501,
        "NotImplementedError",
        "messages",
        "image_url",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, BAD, "messages", "no text"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        400,
        BAD,
        "messages",
        "JSON",
    ),
    ("/tokenize", {}, 400, BODY, "prompt", "required"),
    ("/tokenize", {"prompt": 5}, 400, BODY, "prompt", ""),
    ("/tokenize", {"messages": [], "prompt": "a"}, 400, BODY, "messages", ""),
    ("/tokenize", {"prompt": "a", "model": "nope"}, 404, "NotFoundError", "model", ""),
    ("/detokenize", {"tokens": "a"}, 400, BODY, "tokens", ""),
    ("/detokenize", {"tokens": [999]}, 400, BAD, "tokens", ""),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param", "text"), CASES, ids=[f"{c[0]}-{str(c[1])[:60]}" for c in CASES]
)
async def test_wrong_fields_are_named(client, context, path, body, status, kind, param, text):
    answer = await client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status, error
    assert kind is None or error["type"] == kind
    assert param is None or error["param"] == param, error
    assert text in error["message"] and len(error["message"]) < 1500
    assert not context.engine.seen and context.admission.in_flight == 0


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"not json", "JSON"),
        (b"[]", "object"),
        (b'"text"', "object"),
        (b"null", "object"),
        (b'{"prompt": "a"} trailing', "JSON"),
        (b'{"prompt": "\xff\xfe"}', "JSON"),
        (b'{"prompt": "\\ud800"}', "JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": Infinity}', "finite"),
        (b'{"prompt": "a", "temperature": 1e999}', "finite"),
        (b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}", ""),
        (b'{"a":' * 15_000 + b"1" + b"}" * 15_000, "JSON"),
        (b'{"prompt": ' + b"[" * 15_000, "JSON"),
        (b'{"prompt": "a", "logit_bias": {"1": NaN}}', "finite"),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else "",
)
async def test_what_is_no_json_is_a_400(client, context, content, text):
    answer = await client.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and text in answer.json()["error"]["message"], answer.text
    assert not context.engine.seen


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
async def test_only_json_is_read(client, content_type):
    headers = {"content-type": content_type} if content_type else {}
    answer = await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == 400 and "application/json" in answer.json()["error"]["message"]


async def test_a_charset_parameter_does_no_harm(client):
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)).status_code == 200


async def test_many_errors_are_cut_to_ten_and_inputs_are_shortened(client):
    fields = ("n", "max_tokens", "stream", "seed", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens")
    body = dict.fromkeys((*fields, "priority", "echo"), "y" * 5000)
    answer = await client.post(COMPLETIONS, json={"prompt": "a", **body})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "and 2 more" in message and len(message) < 3000


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 1000},
        {"messages": [{"role": "user", "content": [1] * 1000}]},
        {"messages": HI, "tools": [1] * 1000},
        {"messages": HI, "documents": [1] * 1000},
        {"messages": HI, "stop": [1] * 1000},
        {"messages": HI, "logit_bias": dict.fromkeys(map(str, range(1000)), "x")},
    ],
    ids=lambda body: ", ".join(body),
)
def test_a_thousand_wrong_elements_are_one_error(body):
    """Each costs microseconds and a kilobyte: a megabyte of them held everybody up for seconds."""
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate_json(json.dumps(body))
    assert len(caught.value.errors()) <= 2  # of a text or list: one each


async def test_a_prompt_of_special_tokens_only_is_served(client):
    assert (await client.post(COMPLETIONS, json={"prompt": [256, 257, 258], "max_tokens": 1})).status_code == 200
    assert (await client.post(COMPLETIONS, json={"prompt": "<s></s>", "max_tokens": 1})).status_code == 200


async def test_one_wrong_prompt_of_several_starts_none(client, context):
    answer = await client.post(COMPLETIONS, json={"prompt": [[97], [98], [999]]})
    assert answer.status_code == 400 and not context.engine.seen


async def test_null_means_not_given(client):
    body = {"prompt": "a", "max_tokens": 1, "n": None, "temperature": None, "stop": None, "stream": None, "seed": None}
    assert (await client.post(COMPLETIONS, json=body)).status_code == 200


async def test_bodies_up_to_the_limit_are_read_as_a_whole(client):
    answer = await client.post(COMPLETIONS, json={"prompt": 'x, "[{' * 1_000_000})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input_text"
