"""AsyncLLM over a real engine process whose model is a fake: how tests start it, ask it and look into it."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

import psutil

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.async_llm import AsyncLLM
from kvctl.engine.engine_process import spawn_engine
from kvctl.engine.request_output import RequestOutput
from kvctl.metrics.recorder import InMemoryRecorder
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE, build_tokenizer
from tests.support.fakes import engine_config

TOKENIZER = build_tokenizer()
SLOW = b"\x03slow"  # the fake engine takes 20 ms per token
RAISES, EXITS = b"\x01", b"\x02"


@contextlib.asynccontextmanager
async def running(
    builder: str = "tests.support.fakes:build_echo_core",
    *,
    on_dead: Callable[[Any], None] | None = None,
    on_report: Callable[[str], None] | None = None,
    stall_timeout_s: float | None = None,
    **config: Any,
) -> AsyncIterator[AsyncLLM]:
    """An engine that is gone at the end, whatever happened to it."""
    llm = await AsyncLLM.start(
        engine_config(**config),
        tokenizer=TOKENIZER,
        recorder=InMemoryRecorder(),
        eos_token_ids=frozenset({EOS_ID}),
        vocab_size=VOCAB_SIZE,
        spawned=spawn_engine(builder),
        on_dead=on_dead,
        on_report=on_report,
        stall_timeout_s=stall_timeout_s,
    )
    try:
        async with asyncio.timeout(30):
            yield llm
    finally:
        await llm.shutdown()
        assert not psutil.pid_exists(llm.engine_pid)


def generate(
    llm: AsyncLLM, prompt: Iterable[int], request_id: str = "r", **params: Any
) -> AsyncGenerator[RequestOutput, None]:
    """Twelve tokens of a prompt, unless `params` say otherwise."""
    priority, cache_salt = params.pop("priority", 0), params.pop("cache_salt", None)
    sampling = SamplingParams(**({"max_tokens": 12} | params))
    return llm.generate(list(prompt), sampling, request_id=request_id, priority=priority, cache_salt=cache_salt)


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    """All that comes."""
    return [output async for output in stream]


def text_of(outputs: Iterable[RequestOutput], index: int = 0) -> str:
    """The text of one child."""
    return "".join(output.text_delta for output in outputs if output.index == index)


def counter(llm: AsyncLLM, name: str, **labels: str) -> float:
    """The value of a counter."""
    return llm._metrics._recorder.counter(name, **labels).value


def gauge(llm: AsyncLLM, name: str) -> float:
    """The value of a gauge."""
    return llm._metrics._recorder.gauge(name).value


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something holds; a hang is a failure."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)
