"""Wrong, broken and vanishing clients of a real engine: the pool comes back to its start, others never notice."""

import asyncio
import json
import threading

import httpx
import pytest

from tests.server.live import post, read_head, request
from tests.server.test_bad_input import CASES

OF_A_SHORTER_MODEL = ("x" * 256, "x" * 70_000)  # too long for the stub only


@pytest.fixture
def reference(server):
    """A request whose greedy answer must be the same whatever happens beside it."""
    body = {"prompt": "undisturbed", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    def ask():
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

    return ask


def test_bad_requests_leave_nothing_behind_and_disturb_nobody(server, reference):
    expected = reference()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(reference()))
    thread.start()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for path, body, status, *_ in CASES:
            if body.get("prompt") in OF_A_SHORTER_MODEL or 257 in body.values():
                continue
            assert client.post(path, json=body).status_code == status, body
        for content in (b"", b"{", b'{"prompt": "\xff"}', b'{"a":' * 10_000, b'{"prompt":"a","temperature":NaN}'):
            answer = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 400
    thread.join()
    assert answers == [expected]
    server.wait_idle()
    assert reference() == expected


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_vanished_clients_blocks_are_free_again(server, is_streamed):
    port = int(server.url.rpartition(":")[2])
    aborted = await asyncio.to_thread(server.metric, "vllm:request_success_total", finished_reason="abort")
    body = json.dumps({"prompt": "going " * 10, "max_tokens": 400, "ignore_eos": True, "stream": is_streamed}).encode()
    # so many that some are still to run when the clients vanish, however fast the model is
    writers = [(await request(port, post("/v1/completions", body), body))[1] for _ in range(100)]

    def count():
        return server.metric("vllm:num_requests_running")

    async with asyncio.timeout(10):
        while await asyncio.to_thread(count) < 1:
            await asyncio.sleep(0.01)
    for writer in writers:
        writer.transport.abort()
    await asyncio.to_thread(server.wait_idle)
    after = await asyncio.to_thread(server.metric, "vllm:request_success_total", finished_reason="abort")
    assert after > aborted


def test_many_prompts_times_many_choices_are_one_answer(server):
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"prompt": ["a"] * 64, "n": 8, "max_tokens": 2}, timeout=60
    )
    assert len(answer.json()["choices"]) == 512
    server.wait_idle()


async def test_hundreds_of_connections_at_once_are_served(server):
    port = int(server.url.rpartition(":")[2])
    body = json.dumps({"prompt": "many", "max_tokens": 2, "ignore_eos": True}).encode()

    async def ask():
        reader, writer = await request(port, post("/v1/completions", body), body)
        status, _ = await read_head(reader)
        writer.close()
        return status

    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(300)]
    assert set(await asyncio.gather(*(ask() for _ in range(300)))) == {200}
    for _, writer in idle:
        writer.close()
    await asyncio.to_thread(server.wait_idle)
