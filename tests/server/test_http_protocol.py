"""Hostile and broken clients on real sockets."""

import asyncio
import contextlib
import json
import socket

import pytest

from kvctl.server import http_protocol, web
from kvctl.server.body import BodyReader
from tests.server.live import post, raw, read_head, request, running, until


@pytest.fixture
async def live(context):
    async with running(context) as (server, port):
        yield server, port
    assert context.admission.in_flight == 0 and context.engine.num_unfinished == 0


async def test_a_large_body_is_refused_from_its_announcement_alone(live):
    _, port = live
    reader, writer = await request(
        port, "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: 104857600"
    )
    status, _ = await read_head(reader)
    assert status == 413
    writer.close()


async def test_a_hundred_megabytes_are_read_away_not_kept_and_the_client_hears_413(live):
    _, port = live
    reader, writer = await request(
        port, "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nTransfer-Encoding: chunked"
    )
    piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    for _ in range(100):
        writer.write(piece)
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    status, headers = await read_head(reader)
    assert status == 413
    answer = json.loads(await reader.readexactly(int(headers["content-length"])))
    assert answer["error"]["code"] == 413
    # the connection is still good
    small = b'{"prompt":"a","max_tokens":1}'
    writer.write(raw(post("/v1/completions", small), small))
    assert (await read_head(reader))[0] == 200
    writer.close()


async def test_a_body_that_never_ends_gets_408(live, context):
    context.bodies = BodyReader(1000, timeout_s=0.1)
    _, port = live
    reader, writer = await request(port, post("/v1/completions", b"x" * 50), b'{"prompt"')
    status, headers = await read_head(reader)
    assert status == 408
    assert json.loads(await reader.readexactly(int(headers["content-length"])))["error"]["type"] == "RequestTimeout"
    writer.close()


@pytest.mark.parametrize(
    "said", [b"", b"\r\n", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=repr
)
async def test_a_client_that_does_not_finish_its_head_is_hung_up_on(context, monkeypatch, said):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.15)
    async with running(context) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        async with asyncio.timeout(3):
            assert await reader.read() == b""
        await until(lambda: not server.server_state.connections)
        writer.close()


async def test_a_client_that_drips_its_head_is_hung_up_on_too(context, monkeypatch):
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.2)
    async with running(context) as (_, port):
        reader, writer = await request(port, "GET /version HTTP/1.1\nHost: x")
        assert (await read_head(reader))[0] == 200
        await reader.readuntil(b"}")
        for letter in b"GET /version HTTP/1.1\r\nX-Slow: very":
            writer.write(bytes([letter]))
            await asyncio.sleep(0.02)
            if reader.at_eof():
                break
        async with asyncio.timeout(10):
            with contextlib.suppress(ConnectionResetError):  # what it closes with may lie unread
                assert await reader.read() == b""
        writer.close()


async def test_an_endless_head_gets_431(live):
    _, port = live
    reader, writer = await request(port, "GET /health HTTP/1.1\nHost: x")
    await read_head(reader)
    writer.write(b"GET /health HTTP/1.1\r\nX-Long: " + b"y" * 200_000)
    data = await reader.read()
    assert b"431 Request Header Fields Too Large" in data
    writer.close()


STREAM = b'{"prompt":"a","max_tokens":200,"stream":true}'
CHUNKED = "POST /v1/completions HTTP/1.1\nHost: x\nContent-Type: application/json\nTransfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("head", "endless"),
    [
        (raw(post("/v1/completions", STREAM), STREAM), b"GET /health HTTP/1.1\r\nX-Long: "),
        (raw(CHUNKED, b"0\r\n"), b"X-Trailer: "),
        (raw(CHUNKED), b"1;extension="),
    ],
    ids=["a head behind a running request", "trailers", "the extension of a chunk"],
)
async def test_what_has_no_end_is_hung_up_on_wherever_it_stands(make_context, head, endless):
    """The parser keeps all of it, so it must not be fed without end."""
    context = make_context(delay_s=0.1)
    async with running(context) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + endless)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                writer.write(b"y" * 10_000)
                await writer.drain()
                await asyncio.sleep(0.002)
        writer.close()
        await until(lambda: context.engine.num_unfinished == 0 and not server.server_state.connections)


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00\x01\x00", b"HELLO\r\n\r\n", b"GET  HTTP/1.1\r\n\r\n"], ids=repr
)
async def test_what_is_no_http_gets_400(live, garbage):
    _, port = live
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(garbage)
    assert b" 400 " in await reader.readline()
    writer.close()


async def test_pipelined_requests_are_answered_in_order(live):
    _, port = live
    one, two = b'{"prompt":"a","max_tokens":1}', b'{"prompt":"b","max_tokens":1}'
    both = b"".join(raw(post("/v1/completions", b), b) for b in (one, two))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(both)
    texts = []
    for _ in range(2):
        _, headers = await read_head(reader)
        texts.append(json.loads(await reader.readexactly(int(headers["content-length"])))["choices"][0]["text"])
    assert texts == ["a", "b"]
    writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request(make_context, is_streamed):
    context = make_context(delay_s=0.01)
    async with running(context) as (_, port):
        body = json.dumps({"prompt": ["a", "b"], "max_tokens": 200, "stream": is_streamed}).encode()
        _, writer = await request(port, post("/v1/completions", body), body)
        await until(lambda: context.engine.num_unfinished == 2)
        writer.close()
        await until(lambda: context.engine.num_unfinished == 0)
        await until(lambda: context.admission.in_flight == 0)


async def test_a_client_that_leaves_with_more_requests_sent_ends_the_running_one_too(make_context):
    context = make_context(delay_s=0.02)
    async with running(context) as (_, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(3 * raw(post("/v1/completions", STREAM), STREAM))
        await until(lambda: context.engine.num_delivered > 2)
        writer.transport.abort()
        await until(lambda: context.engine.num_unfinished == 0, timeout_s=2)
        assert len(context.engine.seen) == 1


async def test_a_stream_right_behind_a_body_that_nobody_wanted_is_not_an_idle_connection(make_context, monkeypatch):
    """A pooled connection: the end of a refused request's body and the next request come in one read."""
    monkeypatch.setattr(web, "KEEP_ALIVE_TIMEOUT_S", 0.2)
    context = make_context(delay_s=0.02)
    async with running(context) as (_, port):
        reader, writer = await request(port, post("/v1/nowhere", b"x" * 20), b"x" * 10)
        status, headers = await read_head(reader)
        assert status == 404
        await reader.readexactly(int(headers["content-length"]))
        writer.write(b"x" * 10 + raw(post("/v1/completions", STREAM), STREAM))
        assert (await read_head(reader))[0] == 200
        async with asyncio.timeout(10):
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()


async def test_a_client_that_does_not_take_the_last_bytes_is_cut_off(make_context, monkeypatch):
    """They are too few to stop the writer, and closing waits for them."""
    monkeypatch.setattr(http_protocol, "WRITE_STALL_TIMEOUT_S", 0.2)
    context = make_context()
    context.engine.tokenizer.token_text = lambda token_id: "x" * 60_000
    async with running(context) as (server, port):
        server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted ones inherit it
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
        body = b'{"prompt":"a","max_tokens":1}'
        client.send(raw(post("/v1/completions", body).replace("HTTP/1.1", "HTTP/1.0"), body))
        await until(lambda: context.engine.num_delivered == 1)
        await until(lambda: not server.server_state.connections)
        client.close()


async def test_a_client_that_does_not_read_stops_its_own_stream_only_and_is_cut_off(make_context, monkeypatch):
    monkeypatch.setattr(http_protocol, "WRITE_STALL_TIMEOUT_S", 0.3)
    context = make_context()
    long_text = "x" * 100
    context.engine.tokenizer.token_text = lambda token_id: long_text * 200
    async with running(context) as (_, port):
        body = b'{"prompt":"a","max_tokens":250,"n":8,"stream":true}'
        _, writer = await request(port, post("/v1/completions", body), body)
        await until(lambda: context.engine.num_delivered > 10)
        await asyncio.sleep(0.1)
        delivered = context.engine.num_delivered
        assert delivered < 8 * 250  # 40 MB do not fit the buffers: the stream stands still
        other = b'{"prompt":"b","max_tokens":1}'
        reader, second = await request(port, post("/v1/completions", other), other)
        assert (await read_head(reader))[0] == 200
        await until(lambda: context.engine.num_unfinished == 0)
        writer.close()
        second.close()


async def test_http_1_0_and_head_are_answered(live):
    _, port = live
    reader, writer = await request(port, "GET /version HTTP/1.0\nHost: x")
    status, headers = await read_head(reader)
    assert status == 200 and headers["connection"] == "close"
    writer.close()
    reader, writer = await request(port, "HEAD /health HTTP/1.1\nHost: x")
    assert (await read_head(reader))[0] == 200
    writer.close()


async def test_paths_that_are_no_ascii_do_no_harm(live):
    _, port = live
    for target in ("/v1/models/%ff%fe", "/v1/models/caf%C3%A9", "/%2e%2e/%00"):
        reader, writer = await request(port, f"GET {target} HTTP/1.1\nHost: x")
        assert (await read_head(reader))[0] == 404
        writer.close()


async def test_expect_100_continue_is_honoured(live):
    _, port = live
    body = b'{"prompt":"a","max_tokens":1}'
    reader, writer = await request(port, post("/v1/completions", body) + "\nExpect: 100-continue")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
    writer.write(body)
    assert (await read_head(reader))[0] == 200
    writer.close()


async def test_hundreds_of_idle_connections_do_no_harm(live):
    _, port = live
    idle = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(400)))
    reader, writer = await request(port, "GET /health HTTP/1.1\nHost: x")
    assert (await read_head(reader))[0] == 200
    for _, open_writer in (*idle, (reader, writer)):
        open_writer.close()
