"""A whole application over the stub engine, and a client that talks ASGI to it without a socket."""

import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from kvctl.metrics.recorder import PrometheusRecorder
from kvctl.server.admission import Admission
from kvctl.server.app import build_app
from kvctl.server.context import ServedModel, ServingContext
from kvctl.server.exchange import Closing
from kvctl.server.options import ApiOptions
from kvctl.server.sampling_defaults import SamplingDefaults, SamplingLimits
from tests.server.stub_engine import INFO, StubEngine
from tests.support.byte_tokenizer import VOCAB_SIZE, build_tokenizer

MODEL = "stub-model"
MakeContext = Callable[..., ServingContext]


@pytest.fixture
def make_context() -> MakeContext:
    """A function, because most of it must be built inside a running event loop."""

    def make(
        *,
        delay_s: float = 0.0,
        max_in_flight: int | None = None,
        defaults: SamplingDefaults | None = None,
        **options: Any,
    ) -> ServingContext:
        tokenizer = build_tokenizer()
        return ServingContext(
            engine=StubEngine(tokenizer, delay_s=delay_s),
            tokenizer=tokenizer,
            metrics=PrometheusRecorder(model_name=MODEL, max_model_len=INFO.max_model_len),
            model=ServedModel((MODEL, "alias"), "/models/stub", 1_700_000_000),
            defaults=defaults or SamplingDefaults(),
            limits=SamplingLimits(INFO.max_model_len, VOCAB_SIZE),
            admission=Admission(max_in_flight),
            closing=Closing(),
            options=ApiOptions(**options),
            request_numbers=itertools.count(),
        )

    return make


@pytest.fixture
async def context(make_context: MakeContext) -> ServingContext:
    return make_context()


@pytest.fixture
async def client(context: ServingContext) -> AsyncIterator[httpx.AsyncClient]:
    async with connect(context) as connected:
        yield connected


def connect(context: ServingContext) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(context))
    return httpx.AsyncClient(transport=transport, base_url="http://test")
