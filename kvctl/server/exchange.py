"""One client's exchange: the engine streams behind it, and its three ways to end early.

A client that leaves, a server that shuts down and an engine that dies all end an exchange; in each case the
streams are closed, and closing a stream aborts its request in the engine. Knows no JSON. Floor 3.
"""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.types import Receive

from kvctl.engine.request_output import RequestOutput
from kvctl.server.errors import ClientDisconnected, ShuttingDown

STARTS_PER_TURN: Final = 16
Result = TypeVar("Result")
OutputStream = AsyncGenerator[RequestOutput, None]


class Closing:
    """Tells every exchange that the server ends now. One per server."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort_all(self) -> None:
        """End all exchanges, now and from now on."""
        if not self._future.done():
            self._future.set_result(None)

    @property
    def future(self) -> asyncio.Future[None]:
        """Done once everything shall end."""
        return self._future


async def client_left(receive: Receive) -> None:
    """Return when the connection is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def run_for_client(work: Coroutine[Any, Any, Result], receive: Receive, closing: Closing) -> Result:
    """Await `work` as long as somebody waits for it; cancel it otherwise.

    Raises:
        ClientDisconnected: the client left.
        ShuttingDown: the server ends.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(client_left(receive))
    try:
        await asyncio.wait((task, watcher, closing.future), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watcher.done():
            raise ClientDisconnected
        raise ShuttingDown("the server is shutting down", hint="Send the request again, to another server.")
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def merge(streams: Sequence[OutputStream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the stream, output) of several streams as they come; the first error ends all.

    Close it (`aclosing`) before the streams: until then it reads them.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async with aclosing(stream):
                async for output in stream:
                    await queue.put((index, output))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(pump(index, stream)))
            if index % STARTS_PER_TURN == STARTS_PER_TURN - 1:
                await asyncio.sleep(0)  # a stream's first step hands its request to the engine: let others' tokens pass
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, RequestOutput):
                yield index, item
            else:
                raise item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def close_all(streams: Sequence[OutputStream]) -> None:
    """Close streams that nobody will read: their requests are aborted."""
    for stream in streams:
        await stream.aclose()
