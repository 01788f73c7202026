"""AsyncLLM: what the server talks to. Starts the engine process, sends requests, hands out streams of text.

Knows no HTTP and no tensors. One callback reads the engine's messages, one message per step for all requests;
text is made there, once per token. Each `generate()` is a stream with room for one merged delta per child, so a
consumer that does not read costs the text it has not read and nothing else. Floor 2, imports no torch.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import StepResult
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.engine_client import EngineClient
from kvctl.engine.engine_metrics import EngineMetrics
from kvctl.engine.engine_process import SpawnedEngine, spawn_engine
from kvctl.engine.input_processor import InputProcessor
from kvctl.engine.output_processor import OutputProcessor
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.stall_watch import StallWatch, cpu_seconds
from kvctl.engine.tokenizer import Tokenizer
from kvctl.engine.wire import AbortRequests, EngineRequest, encode_frame
from kvctl.errors import EngineDead, InvalidRequest, KvctlError
from kvctl.metrics.recorder import Recorder
from kvctl.units import format_seconds

_DRAIN_POLL_S: Final = 0.02
_STALL_LOOK_S: Final = 5.0  # between two looks at the engine process; four in a short timeout
logger = logging.getLogger(__name__)


class _Stream:
    """A request's outputs between the engine's messages and its consumer: one merged output per child at most."""

    __slots__ = ("_error", "_pending", "_waiter")

    def __init__(self) -> None:
        self._pending: dict[int, RequestOutput] = {}
        self._error: KvctlError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Keep an output until the consumer comes; the finished one stays the last."""
        waiting = self._pending.pop(output.index, None)
        self._pending[output.index] = output if waiting is None else waiting.merge(output)
        self._wake()

    def fail(self, error: KvctlError) -> None:
        """Let the consumer read what is there, then raise."""
        self._error = error
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs and return them, at most one per child.

        Raises:
            KvctlError: what `fail` was told.
        """
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs = list(self._pending.values())
        self._pending.clear()
        return outputs

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class AsyncLLM:
    """An engine in a process of its own. Build it with `await AsyncLLM.start(...)`."""

    def __init__(
        self,
        outputs: OutputProcessor,
        metrics: EngineMetrics,
        on_dead: Callable[[EngineDead], None] | None,
        on_report: Callable[[str], None] | None,
    ) -> None:
        self._outputs = outputs
        self._metrics = metrics
        self._on_dead = on_dead
        self._on_report = on_report
        self._client: EngineClient
        self._inputs: InputProcessor
        self._info: EngineInfo
        self._stall: StallWatch
        self._is_stalled = False  # as of the last look, and in the log
        self._watching: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._closing = False
        self._death: EngineDead | None = None

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer,
        recorder: Recorder,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        on_dead: Callable[[EngineDead], None] | None = None,
        on_report: Callable[[str], None] | None = None,
        spawned: SpawnedEngine | None = None,
        stall_timeout_s: float | None = None,
    ) -> "AsyncLLM":
        """Start the engine process and wait until it takes requests.

        Args:
            eos_token_ids, vocab_size: from `model_source.read_model_facts`.
            on_dead: called once, in the event loop, when the engine process ends although nobody asked it to.
            on_report: gets each line the engine reports while it starts (memory budget, KV cache size).
            spawned: from `spawn_engine()`, called earlier to save time; owned here from now on.
            stall_timeout_s: after so long without progress `stall` says so, and the log; None: never.

        Raises:
            KvctlError: of the class that the engine raised while starting (ModelBroken, OutOfMemory, ...).
            EngineDead: the process ended while starting without saying why.
        """
        metrics = EngineMetrics(recorder)
        llm = cls(OutputProcessor(tokenizer, metrics), metrics, on_dead, on_report)
        llm._client, info = await EngineClient.start(spawned or spawn_engine(), config, llm)
        llm._info = info
        llm._inputs = InputProcessor(info, tokenizer, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
        metrics.engine_started(info)
        llm._stall = StallWatch(stall_timeout_s or math.inf, counts_cpu_time=info.device == "cpu")
        if stall_timeout_s is not None:
            llm._watching = asyncio.create_task(llm._watch(min(_STALL_LOOK_S, stall_timeout_s / 4)))
        return llm

    @property
    def info(self) -> EngineInfo:
        """What building the engine found out."""
        return self._info

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process."""
        return self._client.pid

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and takes requests."""
        return self._client.is_alive and not self._closing

    @property
    def stall(self) -> str | None:
        """What is wrong with an engine that lives, has work and does not get on; None: nothing is."""
        stalled_s = self._stall.stalled_s(time.monotonic())
        if stalled_s is None or not self._is_stalled or not self.is_alive:
            return None
        return f"the engine has work and has not finished a step for {format_seconds(stalled_s)}"

    @property
    def num_unfinished(self) -> int:
        """Requests (not children) that have not ended."""
        return self._outputs.num_unfinished

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the request NOW (before the first `async for`), then stream its outputs.

        Output arrives with `finished=True` last. Closing the generator early, or cancelling the task in it,
        aborts the request. `params.max_tokens` is lowered silently so that prompt and output fit `max_model_len`.

        Raises:
            InvalidRequest: at once: empty or too long prompt, token ids outside the vocabulary, an id in use, a number
                over 64 bits. (The engine's builder has seen to it that what is within `max_model_len` fits the cache.)
            EngineDead: at once or from the stream: the engine process has ended, or is shutting down.
        """
        self._check_open()
        children = self._inputs.process(
            f"{request_id}#{next(self._numbers)}",  # late outputs of an earlier request of this id are not for this one
            prompt_token_ids,
            params,
            arrival_s=time.monotonic(),
            priority=priority,
            cache_salt=cache_salt,
        )
        if self._outputs.has(request_id):
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        try:
            frames = [encode_frame(child) for child in children]
        except (OverflowError, ValueError, TypeError) as error:  # a number over 64 bits, half a surrogate pair
            raise InvalidRequest(f"the request holds what cannot be sent to the engine: {error}") from error
        return self._stream(request_id, children, frames, params.max_tokens)

    async def _stream(
        self, request_id: str, children: list[EngineRequest], frames: list[bytes], requested_max_tokens: int
    ) -> AsyncGenerator[RequestOutput, None]:
        self._check_open()
        stream = _Stream()
        self._outputs.add(request_id, children, stream, requested_max_tokens=requested_max_tokens)
        try:
            self._stall.sent(time.monotonic())
            for frame in frames:
                self._client.send_frame(frame)
            while True:
                for output in await stream.take():
                    yield output
                    if output.finished:
                        return
        finally:
            self.abort(request_id)  # does nothing where the request has ended

    def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last output with `FinishReason.ABORT`. Unknown ids are ignored."""
        self._send_aborts(self._outputs.abort(request_id))

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let the running ones finish for up to `drain_s`, abort the rest, end the process.

        A second call while the first one drains, with a shorter time, shortens it.
        """
        self._closing = True
        if self._watching is not None:
            self._watching.cancel()
        deadline_s = time.monotonic() + drain_s
        while self._outputs.num_unfinished and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        for request_id in self._outputs.unfinished_ids():
            self.abort(request_id)
        await self._client.stop()

    # ---- EngineListener ----

    def step_done(self, result: StepResult) -> None:
        """Hand out the news of one step."""
        now_s = time.monotonic()
        to_abort = self._outputs.process(result, now_s)
        self._stall.heard(now_s, owes_more=self._outputs.num_unfinished > 0)
        self._send_aborts(to_abort)

    def request_rejected(self, request_id: str, error: KvctlError) -> None:
        """End the request that the engine refused, with its other children."""
        to_abort = self._outputs.fail(request_id, error)
        self._stall.heard(time.monotonic(), owes_more=self._outputs.num_unfinished > 0)
        self._send_aborts(to_abort)

    def engine_reported(self, line: str) -> None:
        """Pass on a line of the engine's start."""
        if self._on_report is not None:
            self._on_report(line)

    def engine_died(self, error: EngineDead) -> None:
        """End all streams with EngineDead, then tell the owner."""
        self._death = error
        self._outputs.fail_all(error)
        if self._on_dead is not None:
            self._on_dead(error)

    # ---- internals ----

    def _check_open(self) -> None:
        if self._death is not None:
            raise self._death
        if self._closing:
            raise EngineDead("the server is shutting down", hint="Send the request to another one.")
        if not self._client.is_alive:
            raise EngineDead("the engine process has ended")

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids:
            self._stall.sent(time.monotonic())
            self._client.send(AbortRequests(request_ids))

    async def _watch(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._stall.look(time.monotonic(), cpu_seconds(self.engine_pid))
            was_stalled = self._is_stalled
            self._is_stalled = self.is_alive and self._stall.stalled_s(time.monotonic()) is not None
            if self._is_stalled and not was_stalled:
                logger.warning("%s: it is stopped, stuck, or needs a longer --engine-stall-timeout", self.stall)
            elif was_stalled and not self._is_stalled and self.is_alive:
                logger.info("the engine gets on again")
