"""The scripted server, as an independent client (openai's) sees it."""

import json

import httpx
import openai
import pytest

from kvctl.bench.mock_script import MockScript, StreamWriter
from kvctl.errors import ConfigError


@pytest.fixture
def client_of():
    clients = []

    def make(url, **options):
        http_client = httpx.Client(trust_env=False)
        clients.append(http_client)
        return openai.OpenAI(
            base_url=f"{url}/v1", api_key=options.pop("key", "none"), http_client=http_client, max_retries=0
        )

    yield make
    for http_client in clients:
        http_client.close()


def test_chat_streams_role_tokens_finish_and_usage(mock_server, client_of):
    stream = client_of(mock_server()).chat.completions.create(
        model="mock",
        messages=[{"role": "user", "content": "one two three"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
    assert texts == [" tok"] * 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens == 3


def test_completions_answer_whole_too_and_keep_max_tokens(mock_server, client_of):
    answer = client_of(mock_server()).completions.create(model="mock", prompt="a b", max_tokens=3)
    assert answer.choices[0].text == " tok" * 3
    assert answer.usage.completion_tokens == 3
    ids = client_of(mock_server()).completions.create(model="mock", prompt=[1, 2, 3, 4], max_tokens=1)
    assert ids.usage.prompt_tokens == 4


def test_models_are_listed_and_an_unknown_one_is_404(mock_server, client_of):
    client = client_of(mock_server(model="tiny"))
    assert [card.id for card in client.models.list()] == ["tiny"]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")


def test_an_api_key_is_asked_for(mock_server, client_of):
    url = mock_server(api_key="secret")
    with pytest.raises(openai.AuthenticationError):
        client_of(url, key="wrong").models.list()
    assert client_of(url, key="secret").models.list().data


@pytest.mark.parametrize(("fault", "error"), [("429", openai.RateLimitError), ("503", openai.InternalServerError)])
def test_overload_is_answered_with_retry_after(mock_server, client_of, fault, error):
    with pytest.raises(error) as refused:
        client_of(mock_server(fault=fault, retry_after_s=7.0)).completions.create(model="mock", prompt="a")
    assert refused.value.response.headers["retry-after"] == "7"


def test_an_error_in_mid_stream_reaches_the_client(mock_server, client_of):
    stream = client_of(mock_server(fault="error")).completions.create(model="mock", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="engine has failed"):
        list(stream)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"prompt": 3}'])
def test_a_body_that_is_no_request_is_400(mock_server, body):
    with httpx.Client(trust_env=False) as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            assert client.post(mock_server() + path, content=body).status_code == 400
        assert client.get(mock_server() + "/nothing").status_code == 404


def test_slots_make_streams_wait_in_line(mock_server):
    from kvctl.metrics.exposition import parse_page

    url = mock_server(slots=2, ttft_s=0.3)
    import threading

    def ask():
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}, trust_env=False, timeout=20)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        page = parse_page(httpx.get(f"{url}/metrics", trust_env=False).content)
        seen.add((page.value("vllm:num_requests_running"), page.value("vllm:num_requests_waiting")))
    for thread in threads:
        thread.join()
    assert max(running for running, _ in seen) == 2
    assert max(waiting for _, waiting in seen) >= 2
    assert httpx.get(f"{url}/mock/log", trust_env=False).json()["max_running"] == 2


def test_a_repeated_prefix_is_told_as_cached(mock_server):
    url = mock_server(prefix_cache=True)
    prompt = " ".join(f"w{i}" for i in range(64))
    usages = [
        httpx.post(f"{url}/v1/completions", json={"prompt": prompt}, trust_env=False).json()["usage"] for _ in range(2)
    ]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 64]


def plan(script, endpoint="chat", **options):
    fields = {"fault": None, "include_usage": True, "continuous_usage": False, "prompt_tokens": 3, "cached_tokens": 0}
    return StreamWriter(script).plan(endpoint, script.tokens, **(fields | options))


def test_writes_stand_at_the_moments_of_the_script():
    writes = plan(MockScript(tokens=8, tokens_per_event=4)).writes
    assert [(write.at_s, write.num_tokens) for write in writes if write.num_tokens] == [
        (0.05, 4),
        (pytest.approx(0.09), 4),
    ]
    assert writes[0].at_s == 0.0  # the role


def test_a_trickled_event_ends_at_its_moment():
    writes = list(plan(MockScript(tokens=2, trickle_bytes=20), "completions").writes)
    ends = [write.at_s for write in writes if write.num_tokens]
    assert ends == [0.05, pytest.approx(0.06)]
    assert [write.at_s for write in writes] == sorted(write.at_s for write in writes)


def test_chunks_are_framed_as_http_says():
    data = plan(MockScript(tokens=1), "completions").writes[0].data
    size, _, rest = data.partition(b"\r\n")
    assert len(rest) == int(size, 16) + 2
    assert json.loads(rest[len(b"data: ") :])["choices"][0]["text"] == " tok"


@pytest.mark.parametrize(
    "fields", [{"fault": "fire"}, {"tokens": 0}, {"gap_s": -1}, {"fault_share": 2}, {"tokens_per_event": 0}]
)
def test_an_impossible_script_is_refused(fields):
    with pytest.raises(ConfigError):
        MockScript(**fields)


async def test_without_the_kernels_clock_asyncio_reads(monkeypatch):
    """As on systems that are no Linux."""
    import asyncio

    from kvctl.bench import mock_server as module

    class NoStamps:
        are_on = False

        def close(self):
            pass

    monkeypatch.setattr(module, "KernelStamps", NoStamps)
    server = module.MockServer(MockScript(ttft_s=0.01, gap_s=0.001, tokens=2), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"prompt": "a", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    answer = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 10)
    assert answer.count(b" tok") == 2
    writer.close()
    await writer.wait_closed()
    server.close()
