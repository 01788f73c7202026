"""Streams that end badly: engine death, refusal in mid-stream, shutdown."""

import asyncio
import json
from contextlib import aclosing

import pytest

from kvctl.core.request import FinishReason
from kvctl.errors import InvalidRequest
from tests.server.live import post, read_head, request, running, until

BODIES = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 200},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 200},
}


def read_events(data: bytes) -> list:
    """Events of a chunked body; [DONE] as text."""
    text = b"".join(line + b"\n" for line in data.split(b"\r\n") if line.startswith(b"data: ")).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_a_dying_engine_ends_a_stream_with_an_error_event_and_done(make_context, path, num_prompts):
    body = dict(BODIES[path], stream=True)
    if "prompt" in body and num_prompts == 2:
        body["prompt"] = ["abc", "def"]
    context = make_context(delay_s=0.01)
    async with running(context) as (_, port):
        data = json.dumps(body).encode()
        reader, writer = await request(port, post(path, data), data)
        assert (await read_head(reader))[0] == 200
        await reader.readuntil(b"\n\n")
        context.engine.die()
        rest = await reader.readuntil(b"[DONE]\n\n")
        events = read_events(rest)
        assert events[-1] == "[DONE]" and events[-2]["error"]["code"] == 503
        assert events[-2]["error"]["type"] == "ServiceUnavailableError"
        await until(lambda: context.engine.num_unfinished == 0)
        writer.close()


@pytest.mark.parametrize("path", BODIES)
async def test_a_dying_engine_fails_a_whole_answer_with_503(make_context, path):
    context = make_context(delay_s=0.01)
    async with running(context) as (_, port):
        data = json.dumps(BODIES[path]).encode()
        reader, writer = await request(port, post(path, data), data)
        await until(lambda: context.engine.num_unfinished == 1)
        context.engine.die()
        assert (await read_head(reader))[0] == 503
        writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_shutdown_tells_everybody_and_aborts(make_context, is_streamed):
    context = make_context(delay_s=0.01)
    async with running(context) as (_, port):
        data = json.dumps(dict(BODIES["/v1/completions"], stream=is_streamed)).encode()
        reader, writer = await request(port, post("/v1/completions", data), data)
        await until(lambda: context.engine.num_unfinished == 1)
        context.closing.abort_all()
        status, headers = await read_head(reader)
        if is_streamed:
            events = read_events(await reader.readuntil(b"[DONE]\n\n"))
            assert status == 200 and "shutting down" in events[-2]["error"]["message"]
        else:
            assert status == 503 and headers["retry-after"]
        await until(lambda: context.engine.num_unfinished == 0)
        writer.close()


async def test_shutdown_waits_for_no_body(context):
    async with running(context) as (_, port):
        reader, writer = await request(port, post("/v1/completions", b"x" * 100), b'{"prompt"')
        answer = asyncio.create_task(read_head(reader))
        await asyncio.sleep(0.05)
        context.abort_all()
        status, headers = await answer
        assert status == 503 and headers["connection"] == "close"
        writer.close()


async def test_a_refusal_by_the_scheduler_reaches_the_client(make_context):
    context = make_context()
    original = context.engine.generate

    def refuse(*args, **kwargs):
        async def stream():
            async for _ in original(*args, **kwargs):
                raise InvalidRequest("can never fit", param="prompt")
            yield

        return stream()

    context.engine.generate = refuse
    async with running(context) as (_, port):
        for is_streamed, status in ((False, 400), (True, 200)):
            data = json.dumps(dict(BODIES["/v1/completions"], stream=is_streamed)).encode()
            reader, writer = await request(port, post("/v1/completions", data), data)
            assert (await read_head(reader))[0] == status
            if is_streamed:
                events = read_events(await reader.readuntil(b"[DONE]\n\n"))
                assert events[-2]["error"] == {
                    "message": "can never fit",
                    "type": "BadRequestError",
                    "param": "prompt",
                    "code": 400,
                }
            writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_prompt_that_fails_in_the_engine_ends_the_others_without_an_uproar(make_context, caplog, is_streamed):
    context = make_context(delay_s=0.005)
    original = context.engine.generate

    def fail_later(prompt, *args, **kwargs):
        stream = original(prompt, *args, **kwargs)
        if bytes(prompt) != b"bad":
            return stream

        async def failing():
            async with aclosing(stream):
                async for output in stream:
                    output.finish_reason = FinishReason.ERROR if len(context.engine.running) == 4 else None
                    yield output

        return failing()

    context.engine.generate = fail_later
    async with running(context) as (_, port):
        body = {"prompt": ["good", "bad", "fine", "well"], "max_tokens": 200, "stream": is_streamed}
        data = json.dumps(body).encode()
        reader, writer = await request(port, post("/v1/completions", data), data)
        status, _ = await read_head(reader)
        if is_streamed:
            assert "failed in the engine" in read_events(await reader.readuntil(b"[DONE]\n\n"))[-2]["error"]["message"]
        else:
            assert status == 500
        await until(lambda: context.engine.num_unfinished == 0 and context.admission.in_flight == 0)
        writer.close()
    assert not [record for record in caplog.records if record.exc_info], "a generator was closed while it was read"


async def test_one_streams_end_does_not_touch_another(make_context):
    context = make_context(delay_s=0.005)
    async with running(context) as (_, port):
        data = json.dumps(dict(BODIES["/v1/completions"], stream=True, max_tokens=40)).encode()
        leaving = [await request(port, post("/v1/completions", data), data) for _ in range(5)]
        staying, staying_writer = await request(port, post("/v1/completions", data), data)
        await until(lambda: context.engine.num_unfinished == 6)
        for _, writer in leaving:
            writer.close()
        await until(lambda: context.engine.num_unfinished == 1)
        events = read_events(await staying.readuntil(b"[DONE]\n\n"))
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == ("abc" * 14)[:40]
        staying_writer.close()
        await asyncio.sleep(0)
