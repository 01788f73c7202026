"""AsyncLLM: what the server talks to. Starts the engine process, sends requests, hands out streams of text.

Knows no HTTP and no tensors. One callback reads the engine's messages, one message per step for all requests;
text is made there, once per token. Each `generate()` is a stream with room for one merged delta per child, so a
consumer that does not read costs the text it has not read and nothing else. Floor 2, imports no torch.
"""

from collections.abc import AsyncGenerator, Callable, Sequence

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import EngineDead
from kvctl.metrics.recorder import Recorder

DEFAULT_BUILDER = "kvctl.engine.build:build_engine_core"


class AsyncLLM:
    """An engine in a process of its own. Build it with `await AsyncLLM.start(...)`."""

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
        builder: str = DEFAULT_BUILDER,
    ) -> "AsyncLLM":
        """Start the engine process and wait until it takes requests.

        Args:
            eos_token_ids, vocab_size: from `model_source.read_model_facts`.
            on_dead: called once, in the event loop, when the engine process ends although nobody asked it to.
            on_report: gets each line the engine reports while it starts (memory budget, KV cache size).
            builder: "package.module:function" with the signature of `engine.build.build_engine_core`.

        Raises:
            KvctlError: of the class that the engine raised while starting (ModelBroken, OutOfMemory, ...).
            EngineDead: the process ended while starting without saying why.
        """
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """What building the engine found out."""
        raise NotImplementedError

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and takes requests."""
        raise NotImplementedError

    @property
    def num_unfinished(self) -> int:
        """Requests (not children) that have not ended."""
        raise NotImplementedError

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
            InvalidRequest: at once: empty or too long prompt, token ids outside the vocabulary, an id in use. From the
                stream: the scheduler refused it (it can never fit the KV cache).
            EngineDead: at once or from the stream: the engine process has ended, or is shutting down.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """End a request: its stream gets a last output with `FinishReason.ABORT`. Unknown ids are ignored."""
        raise NotImplementedError

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let the running ones finish for up to `drain_s`, abort the rest, end the process."""
        raise NotImplementedError
