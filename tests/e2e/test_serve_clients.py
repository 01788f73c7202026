"""The clients people use, unmodified, against a real server: openai's package, raw HTTP, vllm bench's requests."""

import asyncio
import http.client
import json
import time
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

HI = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_lists_the_models(client):
    [model] = client.models.list().data
    assert model.id == "tiny" and client.models.retrieve("tiny").id == "tiny"


def test_openai_chat_streamed_and_whole_say_the_same(client):
    whole = client.chat.completions.create(model="tiny", messages=HI, max_tokens=12, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens is not None


def test_openai_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)  # greedy takes the best
        assert sum(2.718281828**top.logprob for top in token.top_logprobs) <= 1.001
        assert bytes(token.bytes) or token.token in ("<s>", "</s>", "<pad>")


def test_openai_completions_with_echo_logprobs_and_n(client):
    answer = client.completions.create(
        model="tiny", prompt="abcd", max_tokens=3, logprobs=2, echo=True, n=2, seed=5, temperature=1
    )
    for choice in answer.choices:
        assert choice.text.startswith("abcd") and len(choice.logprobs.tokens) == 7
        assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.text_offset[:4] == [0, 1, 2, 3]
    again = client.completions.create(model="tiny", prompt="abcd", max_tokens=3, n=2, seed=5, temperature=1, echo=True)
    assert [c.text for c in again.choices] == [c.text for c in answer.choices]


async def test_openai_async_streams_in_parallel_equal_those_alone(server):
    prompts = [f"prompt number {i} " * (i + 1) for i in range(8)]

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        async def stream(prompt):
            parts = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=20, temperature=0, stream=True
            )
            return "".join([part.choices[0].text async for part in parts])

        together = await asyncio.gather(*map(stream, prompts))
        alone = [await stream(prompt) for prompt in prompts]
    assert together == alone and len(set(alone)) > 1


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": 3}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, openai.BadRequestError, "input_tokens"),
    ],
)
def test_openai_raises_its_own_errors(client, change, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": HI, "max_tokens": 2, **change})
    assert caught.value.body["param"] == param


def test_curl_like_raw_http(server):
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname, where.port)
    for _ in range(2):  # over one connection
        body = json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": 2})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200 and json.load(answer)["usage"]["completion_tokens"] == 2
    connection.close()


def test_requests_as_vllm_bench_serve_sends_them(server):
    """Its openai backend: /v1/completions, ignore_eos, include_usage, and it reads usage.completion_tokens."""
    payload = {
        "model": "tiny",
        "prompt": "benchmark " * 5,
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "max_tokens": 100,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    headers = {"Authorization": "Bearer None", "x-request-id": "bench-1"}
    first_token_s, usage, started_s = None, None, time.perf_counter()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=payload, headers=headers) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            data = json.loads(line.removeprefix("data: "))
            if data["choices"]:
                first_token_s = first_token_s or time.perf_counter() - started_s
            elif data["usage"]:
                usage = data["usage"]
    assert first_token_s and usage["completion_tokens"] == 100


def test_metrics_count_what_was_served(server, client):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [server.metric(name) for name in names]
    ended = server.metric("vllm:request_success_total", finished_reason="length")
    answer = client.completions.create(model="tiny", prompt="count me", max_tokens=7, extra_body={"ignore_eos": True})
    grown = [server.metric(name) - value for name, value in zip(names, before, strict=True)]
    assert grown == [answer.usage.prompt_tokens, 7, 1]
    assert server.metric("vllm:request_success_total", finished_reason="length") == ended + 1
    assert server.metric("vllm:cache_config_info", num_gpu_blocks="200", block_size="16") == 1


def test_metrics_page_is_read_by_prometheus_parser(server):
    families = {f.name: f for f in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)}
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "kvctl:max_num_seqs"):
        assert families[name].type == "gauge" and families[name].samples[0].labels["model_name"] == "tiny"
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"


def test_a_prefix_is_found_again_but_not_across_salts(client):
    prompt = "a prefix that is shared by several requests, 64 tokens and more of it"

    def cached(**extra):
        usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body=extra).usage
        return usage.prompt_tokens_details.cached_tokens

    assert cached(cache_salt="alice") == 0
    assert cached(cache_salt="alice") == 64
    assert cached(cache_salt="bob") == 0
    assert cached() == 0 and cached() == 64


def test_a_stop_string_ends_the_text_before_it(client):
    text = client.completions.create(model="tiny", prompt="stop test", max_tokens=40, temperature=0).choices[0].text
    middle = next(c for c in text[3:] if c.isascii() and text.index(c) > 0)
    answer = client.completions.create(model="tiny", prompt="stop test", max_tokens=40, temperature=0, stop=middle)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].model_extra["stop_reason"] == middle
    assert answer.choices[0].text == text[: text.index(middle)]


def test_health_tells_what_it_runs_on(server):
    engine = httpx.get(f"{server.url}/health").json()["engine"]
    assert engine["architecture"] == "LlamaForCausalLM" and engine["num_blocks"] == 200 and engine["dtype"] == "float32"


def test_the_log_has_vllms_words_and_no_noise(server):
    log = server.log()
    assert "KV cache size: 3,200 tokens, Maximum concurrency for 512 tokens per request: " in log
    assert "/metrics" not in log and "/health" not in log and "Traceback" not in log
