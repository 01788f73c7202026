"""The HTTP half of a running server: context, application and uvicorn. Imported while the engine loads.

Knows no signals and no exit codes (`launch.py` does). Floor 3.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Final

import uvicorn

from kvctl.engine.async_llm import AsyncLLM
from kvctl.engine.model_source import ModelFacts, ModelSource
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import KvctlError
from kvctl.metrics.recorder import PrometheusRecorder
from kvctl.server.admission import REASON, Admission
from kvctl.server.app import build_app
from kvctl.server.config import ServeConfig
from kvctl.server.context import ServedModel, ServingContext
from kvctl.server.exchange import Closing
from kvctl.server.http_protocol import BoundedHttpProtocol
from kvctl.server.listener import BACKLOG
from kvctl.server.sampling_defaults import SamplingDefaults, SamplingLimits

KEEP_ALIVE_TIMEOUT_S: Final = 60  # longer than clients keep idle connections, so that they close first
LAST_RESPONSES_S: Final = 3  # for clients that are cut off to receive what they are told


def build_context(
    config: ServeConfig,
    *,
    names: Sequence[str],
    source: ModelSource,
    facts: ModelFacts,
    defaults: SamplingDefaults,
    llm: AsyncLLM,
    tokenizer: Tokenizer,
    recorder: PrometheusRecorder,
) -> ServingContext:
    """Gather what the handlers need. Call it in the event loop that serves."""
    rejections = recorder.counter("vllm:admission_rejections", reason=REASON)
    return ServingContext(
        engine=llm,
        tokenizer=tokenizer,
        metrics=recorder,
        model=ServedModel(tuple(names), config.model.name or source.name, int(time.time())),
        defaults=defaults,
        limits=SamplingLimits(llm.info.max_model_len, facts.vocab_size, config.model.max_logprobs),
        admission=Admission(config.max_num_queued_reqs, rejections.inc),
        closing=Closing(),
        options=config.api,
    )


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is untyped here
    """uvicorn without its signal handlers: whoever runs it decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def wait_started(self, serving: asyncio.Task[None]) -> None:
        """Return when it answers; `serving` is the task that runs it, and what it raises is raised here."""
        while not self.started:
            if serving.done():
                serving.result()
                raise KvctlError("the HTTP server ended while starting")
            await asyncio.sleep(0.001)


def build_server(config: ServeConfig, context: ServingContext) -> HttpServer:
    """Set up uvicorn over the application."""
    network = config.network
    settings = uvicorn.Config(
        build_app(context),
        http=BoundedHttpProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=network.access_log,
        proxy_headers=False,
        server_header=False,
        root_path=config.api.root_path,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=LAST_RESPONSES_S,
        ssl_keyfile=network.ssl_keyfile,
        ssl_certfile=network.ssl_certfile,
        ssl_ca_certs=network.ssl_ca_certs,
        ssl_cert_reqs=network.ssl_cert_reqs,
    )
    return HttpServer(settings)
