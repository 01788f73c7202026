"""Several streams behind one answer."""

import asyncio

import pytest

from kvctl.core.request import FinishReason
from kvctl.engine.request_output import RequestOutput
from kvctl.errors import KvctlError
from kvctl.server.collect import collect
from kvctl.server.exchange import close_all


async def waiting(closed):
    try:
        await asyncio.Event().wait()
        yield
    finally:
        closed.append(True)


async def failing():
    output = RequestOutput("r", [1], 0, "", [])
    output.finish_reason = FinishReason.ERROR
    yield output


async def test_when_one_stream_fails_the_others_can_be_closed_at_once():
    closed = []
    streams = [waiting(closed), failing(), waiting(closed)]
    with pytest.raises(KvctlError, match="failed in the engine"):
        await collect(streams, 1)
    await close_all(streams)  # "asynchronous generator is already running", were they still read
    assert closed == [True, True]
