"""Runs a server from its configuration to its end: socket, model, engine process, API, drain, exit.

    port ─► engine process ─┬─ imports torch ─────────────► loads the model ─┬─► ready ─► serve ─► drain ─► end
                            └─ this process: model folder, ─► web stack, app ─┘
The port is taken first: a taken one is told at once. Then both processes prepare at the same time.
What ends it: SIGTERM or SIGINT (drain up to the timeout, then abort; exit 0), a second one (at once), the death of
the engine (clients get an error, exit 1, so that a supervisor starts it again). Floor 3.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from kvctl import __version__
from kvctl.engine.async_llm import AsyncLLM
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.engine_process import SpawnedEngine, spawn_engine
from kvctl.engine.model_source import ModelFacts, ModelSource, read_model_facts, resolve_model
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import EngineDead
from kvctl.metrics.recorder import PrometheusRecorder
from kvctl.server.config import ServeConfig
from kvctl.server.engine_config import build_engine_config, read_chat_template, read_sampling_defaults
from kvctl.server.listener import bind, check_tls, listen, raise_file_limit, url_of
from kvctl.server.logs import configure_logging
from kvctl.server.stats_log import INTERVAL_S, StatsLog
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.server.context import ServingContext
    from kvctl.server.web import HttpServer

EXIT_INTERRUPTED: Final = 130
DEAD_ENGINE_GRACE_S: Final = 1.0  # /health says 503 that long before the process ends
DRAIN_POLL_S: Final = 0.02
logger = logging.getLogger(__name__)


def launch(config: ServeConfig) -> None:
    """Serve until told to stop.

    Raises:
        KvctlError: the server cannot start, or its engine died.
        KeyboardInterrupt: stopped before it was ready.
    """
    started_s = time.monotonic()
    configure_logging(
        level=config.log_level,
        server_level=config.network.log_level,
        access_log=config.network.access_log,
        quiet_paths=config.network.quiet_paths,
    )
    raise_file_limit()
    check_tls(config.network)
    with bind(config.network) as listener, _engine_process() as spawned:
        source = resolve_model(config.model.name, revision=config.model.revision)
        facts = read_model_facts(source.folder)
        server = _Server(config, source, facts, listener, spawned, started_s)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(server.run())


@contextlib.contextmanager
def _engine_process() -> Iterator[SpawnedEngine]:
    """Start the engine process, and make sure that it is gone at the end, used or not."""
    spawned = spawn_engine()
    try:
        yield spawned
    finally:
        spawned.connection.close()
        if spawned.process.poll() is None:
            spawned.process.kill()
        spawned.process.wait()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not on this platform
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


class _Server:
    """One run of the server. `run()` returns when all is over."""

    def __init__(
        self,
        config: ServeConfig,
        source: ModelSource,
        facts: ModelFacts,
        listener: socket.socket,
        spawned: SpawnedEngine,
        started_s: float,
    ) -> None:
        self._config = config
        self._source = source
        self._facts = facts
        self._listener = listener
        self._spawned = spawned
        self._started_s = started_s
        self._stop = asyncio.Event()
        self._death: EngineDead | None = None
        self._is_ready = False
        self._main: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start, serve, end."""
        loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            await self._serve()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self._death is not None:
            raise self._death

    def _on_signal(self, number: int) -> None:
        if not self._is_ready:
            logger.info("%s before the server was ready: stopping", signal.Signals(number).name)
            if self._main is not None:
                self._main.cancel()
        elif self._stop.is_set():
            logger.warning("%s again: ending at once", signal.Signals(number).name)
            os._exit(EXIT_INTERRUPTED)  # the engine process ends when its line is cut
        else:
            self._stop.set()

    async def _serve(self) -> None:
        config, facts, folder = self._config, self._facts, self._source.folder
        engine_config = build_engine_config(config, facts, folder)
        defaults = read_sampling_defaults(config.model, facts)
        names = config.model.served_names or (self._source.name,)
        logger.info("kvctl %s serves %s as %s", __version__, folder, ", ".join(names))
        recorder = PrometheusRecorder(model_name=names[0], max_model_len=engine_config.scheduler.max_model_len)
        tokenizer = Tokenizer.load(folder, chat_template=read_chat_template(config.model.chat_template))
        starting = asyncio.create_task(self._start_engine(engine_config, tokenizer, recorder))
        try:
            await asyncio.sleep(0.001)  # the engine is told its model now; importing would hold the loop
            from kvctl.server import web

            llm = await starting
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            raise
        try:
            recorder.watch_engine_process(lambda: llm.engine_pid)
            context = web.build_context(
                config,
                names=names,
                source=self._source,
                facts=facts,
                defaults=defaults,
                llm=llm,
                tokenizer=tokenizer,
                recorder=recorder,
            )
            await self._answer_requests(web.build_server(config, context), context, recorder)
        finally:
            await llm.shutdown(0)

    async def _start_engine(
        self, engine_config: EngineConfig, tokenizer: Tokenizer, recorder: PrometheusRecorder
    ) -> AsyncLLM:
        return await AsyncLLM.start(
            engine_config,
            tokenizer=tokenizer,
            recorder=recorder,
            eos_token_ids=self._facts.end_token_ids(tokenizer),
            vocab_size=self._facts.vocab_size,
            on_dead=self._on_engine_dead,
            on_report=logger.info,
            spawned=self._spawned,
            stall_timeout_s=self._config.stall_timeout_s,
        )

    def _on_engine_dead(self, error: EngineDead) -> None:
        logger.error("the engine is dead: %s", error.message)
        self._death = error
        self._stop.set()

    async def _answer_requests(
        self, server: "HttpServer", context: "ServingContext", recorder: PrometheusRecorder
    ) -> None:
        listen(self._listener)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        logging_stats = asyncio.create_task(self._log_stats(recorder, context.engine.info))
        try:
            await server.wait_started(serving)
            self._announce(context)
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            context.is_draining = True
            if self._death is None:
                await self._drain(context)
            else:
                await asyncio.sleep(DEAD_ENGINE_GRACE_S)
            context.abort_all()
            server.should_exit = True
            await serving
        finally:
            logging_stats.cancel()

    def _announce(self, context: "ServingContext") -> None:
        info = context.engine.info
        logger.info(
            "Ready in %s: %s (model %s, %s, %s attention, %s linears)",
            format_seconds(time.monotonic() - self._started_s),
            url_of(self._listener, self._config.network),
            context.model.name,
            info.device,
            info.attention_backend,
            info.linear_backend,
        )
        self._is_ready = True

    async def _drain(self, context: "ServingContext") -> None:
        """Wait for the requests in flight, up to the timeout or the engine's death."""
        timeout_s, in_flight = self._config.shutdown_timeout_s, context.admission.in_flight
        if in_flight and timeout_s:
            logger.info("Shutting down: %d requests in flight get up to %s", in_flight, format_seconds(timeout_s))
        else:
            logger.info("Shutting down")
        deadline_s = time.monotonic() + timeout_s
        while context.admission.in_flight and time.monotonic() < deadline_s and self._death is None:
            await asyncio.sleep(DRAIN_POLL_S)
        if context.admission.in_flight:
            logger.warning("Aborting %d requests", context.admission.in_flight)

    async def _log_stats(self, recorder: PrometheusRecorder, info: EngineInfo) -> None:
        if not self._config.log_stats:
            return
        cache_name = "KV cache" if info.device == "cpu" else "GPU KV cache"
        stats = StatsLog(recorder, time.monotonic, cache_name=cache_name)
        while True:
            await asyncio.sleep(INTERVAL_S)
            if line := stats.line():
                logger.info("%s", line)
