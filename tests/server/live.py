"""The application under real uvicorn on a real socket, in the test's own event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvctl.server.config import NetworkOptions, ServeConfig
from kvctl.server.context import ServingContext
from kvctl.server.listener import bind, listen
from kvctl.server.web import HttpServer, build_server


@contextlib.asynccontextmanager
async def running(context: ServingContext) -> AsyncIterator[tuple[HttpServer, int]]:
    """Yield the server and its port; end it afterwards."""
    config = ServeConfig(network=NetworkOptions(port=0), api=context.options)
    listener = bind(config.network)
    listen(listener)
    port = listener.getsockname()[1]
    server = build_server(config, context)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await server.wait_started(serving)
    try:
        yield server, port
    finally:
        context.abort_all()
        server.should_exit = True
        await serving


async def request(port: int, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request as it is written; `head` without the empty line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(raw(head, body))
    await writer.drain()
    return reader, writer


def raw(head: str, body: bytes = b"") -> bytes:
    """A request as it goes over the wire."""
    return head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body


def post(path: str, body: bytes) -> str:
    """The head of a JSON request."""
    return f"POST {path} HTTP/1.1\nHost: x\nContent-Type: application/json\nContent-Length: {len(body)}"


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    return int(lines[0].split()[1]), headers


async def until(condition, timeout_s: float = 5.0) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
