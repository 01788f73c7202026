"""What the handlers of one server share: the engine, the tokenizer, the model's facts, the operator's limits.

Plain data and two Protocols, no route and no JSON: the Protocols list all that the server needs of `AsyncLLM` and
of the recorder. Floor 3.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.config import EngineInfo
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import ModelNotFound
from kvctl.server.admission import Admission
from kvctl.server.body import BodyReader
from kvctl.server.exchange import Closing
from kvctl.server.logprobs import TokenTexts
from kvctl.server.options import ApiOptions
from kvctl.server.sampling_defaults import SamplingDefaults, SamplingLimits
from kvctl.server.template_process import TemplateProcess


class Engine(Protocol):
    """What the server needs of `AsyncLLM`."""

    @property
    def info(self) -> EngineInfo:
        """What building the engine found out."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        ...

    @property
    def stall(self) -> str | None:
        """Why it does not get on although it lives and has work; None: it does."""
        ...

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Check the request now, then stream its outputs."""
        ...


class Metrics(Protocol):
    """What the server needs of the recorder."""

    def render(self) -> bytes:
        """The /metrics page."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model of this server, under one or more names."""

    names: tuple[str, ...]  # the first is what answers and metrics say
    root: str  # what was asked for: a hub id, a folder, a file
    created_s: int  # Unix time

    @property
    def name(self) -> str:
        """The reported name."""
        return self.names[0]

    def check(self, asked: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ModelNotFound: `asked` is not served here.
        """
        if not asked:
            return self.name
        if asked not in self.names:
            served = ", ".join(self.names)
            raise ModelNotFound(
                f"the model {asked[:200]!r} does not exist here", hint=f"This server serves: {served}.", param="model"
            )
        return asked


@dataclass(slots=True)
class ServingContext:
    """Everything a handler needs. One per server, built by `launch`."""

    engine: Engine
    tokenizer: Tokenizer
    metrics: Metrics
    model: ServedModel
    defaults: SamplingDefaults
    limits: SamplingLimits
    admission: Admission
    closing: Closing
    options: ApiOptions = field(default_factory=ApiOptions)
    template_process: TemplateProcess = field(default_factory=TemplateProcess)
    request_numbers: Iterator[int] = field(default_factory=itertools.count)
    # /tokenize and /detokenize ask for no key: they get one of the threads that tokenize, prompts have the others
    keyless_work: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    is_draining: bool = False  # set on SIGTERM: running requests may end, new ones get 503
    texts: TokenTexts = field(init=False)
    bodies: BodyReader = field(init=False)

    def abort_all(self) -> None:
        """End everything that is being received or answered: the server ends."""
        self.closing.abort_all()
        self.bodies.end_all()

    def __post_init__(self) -> None:
        self.bodies = BodyReader(self.options.max_body_bytes)
        self.texts = TokenTexts(self.tokenizer.token_text, self.tokenizer.backend.id_to_token)
