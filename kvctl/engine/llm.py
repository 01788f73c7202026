"""Offline use: `LLM().generate(prompts)` in this process, without a server, a socket or an event loop.

The same core, checks and text as behind the API. Knows no HTTP. torch is imported when an `LLM` is built, not when
this module is. Floor 2.

    from kvctl import LLM, SamplingParams

    llm = LLM()  # the demo model; or LLM("Qwen/Qwen2.5-0.5B-Instruct"), a folder, a .gguf file
    for result in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=16)):
        print(result.text)
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import TokenLogprobs
from kvctl.engine.config import DeviceConfig, Dtype, EngineConfig, EngineInfo, ModelConfig
from kvctl.engine.engine_metrics import EngineMetrics
from kvctl.engine.engine_process import Builder, Core
from kvctl.engine.input_processor import InputProcessor
from kvctl.engine.model_source import ModelFacts, read_model_facts, resolve_model
from kvctl.engine.output_processor import OutputProcessor
from kvctl.engine.request_output import RequestOutput
from kvctl.engine.tokenizer import Message, Tokenizer
from kvctl.errors import ConfigError, EngineDead, InvalidRequest, KvctlError
from kvctl.metrics.recorder import InMemoryRecorder

DEFAULT_MAX_TOKENS: Final = 256  # where the caller says nothing
Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One answer to one prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # parallel to token_ids, where asked for


@dataclass(slots=True)
class LLMResult:
    """A prompt and its `n` completions; `text`, `token_ids`, `finish_reason`, `logprobs` are those of the first."""

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    completions: list[Completion]
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The first completion's text."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's tokens."""
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The first completion's log probabilities."""
        return self.completions[0].logprobs


def _each_prompt(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    token_ids = [item for item in prompts if isinstance(item, int)]
    others = [item for item in prompts if not isinstance(item, int)]
    if token_ids and others:
        raise InvalidRequest("prompts mixes token ids with texts", hint="Give one prompt, or a list of prompts.")
    return [token_ids] if token_ids else others


class _Collector:
    """A sink that puts deltas together."""

    def __init__(self, result: LLMResult, finished: Callable[[LLMResult], None]) -> None:
        self.result = result
        self.error: KvctlError | None = None
        self._finished = finished

    def put(self, output: RequestOutput) -> None:
        """Add a delta to its completion."""
        completion = self.result.completions[output.index]
        completion.text += output.text_delta
        completion.token_ids += output.token_ids_delta
        completion.logprobs += output.logprobs_delta
        completion.finish_reason = output.finish_reason
        completion.stop_reason = output.stop_reason
        self.result.num_cached_tokens = max(self.result.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            self.result.prompt_logprobs = output.prompt_logprobs
        if output.finished:
            self._finished(self.result)

    def fail(self, error: KvctlError) -> None:
        """Keep the error for the caller."""
        self.error = error


class LLM:
    """A model, ready to generate in this process.

    Args:
        model: None for the demo model, or a hub id, a folder, a .gguf file.
        max_model_len: tokens of prompt and output together; None: what the model was made for.
        kv_cache_memory_bytes: None: a sane share of the free memory.
        progress: show bars on stderr, where that is a terminal.

    Raises:
        ModelNotFound, ModelBroken, ModelNotSupported, OutOfMemory, ConfigError: as the server would.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: Dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        kv_cache_memory_bytes: int | None = None,
        num_gpu_blocks_override: int | None = None,
        num_threads: int | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> None:
        source = resolve_model(model)
        facts = read_model_facts(source.folder)
        if max_model_len is not None and max_model_len > facts.max_model_len:
            raise ConfigError(
                f"max_model_len {max_model_len} is over the model's own length of {facts.max_model_len}",
                hint="Beyond it the answers turn to nonsense; give at most that many.",
            )
        config = EngineConfig(
            ModelConfig(str(source.folder), dtype=dtype, seed=seed),
            SchedulerConfig(
                max_model_len=max_model_len or facts.max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            ),
            CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
            DeviceConfig(
                num_threads=num_threads,
                kv_cache_memory_bytes=kv_cache_memory_bytes,
                num_gpu_blocks_override=num_gpu_blocks_override,
            ),
        )
        from kvctl.engine.build import build_engine_core

        self._set_up(config, Tokenizer.load(source.folder), facts, build_engine_core, progress)

    @classmethod
    def from_parts(
        cls, config: EngineConfig, tokenizer: Tokenizer, facts: ModelFacts, builder: Builder, *, progress: bool = False
    ) -> "LLM":
        """Build an LLM over any engine core, as tests and experiments do."""
        llm = cls.__new__(cls)
        llm._set_up(config, tokenizer, facts, builder, progress)
        return llm

    def _set_up(
        self, config: EngineConfig, tokenizer: Tokenizer, facts: ModelFacts, builder: Builder, progress: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.recorder = InMemoryRecorder(max_model_len=config.scheduler.max_model_len)
        self._progress = progress
        self._generation_config = facts.generation_config
        core, info = builder(config, time.monotonic, lambda line: None)
        self._core: Core = core
        self.info: EngineInfo = info
        metrics = EngineMetrics(self.recorder)
        metrics.engine_started(info)
        self._outputs = OutputProcessor(tokenizer, metrics)
        self._inputs = InputProcessor(
            info, tokenizer, eos_token_ids=facts.end_token_ids(tokenizer), vocab_size=facts.vocab_size
        )
        self._numbers = count()

    @property
    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, with at most 256 tokens."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: self._generation_config[name] for name in names if self._generation_config.get(name) is not None}
        return SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, **given)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[LLMResult]:
        """Complete prompts: one text, one list of token ids, or a sequence of either. Results in the same order.

        Args:
            params: for all prompts, or one for each; None: `default_sampling_params`.

        Raises:
            InvalidRequest: a prompt that cannot be served; then none was started.
        """
        each = _each_prompt(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in each]
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in each]
        return self._run(texts, ids, params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[LLMResult]:
        """Answer a conversation (a list of {"role", "content"}), or several. Results in the same order.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the messages.
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        texts = [
            self.tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
            )
            for conversation in conversations
        ]
        return self._run(texts, [self.tokenizer.encode(text, add_special_tokens=False) for text in texts], params)

    # ---- internals ----

    def _run(
        self,
        texts: Sequence[str | None],
        prompt_ids: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[LLMResult]:
        each = self._params_of_each(params, len(prompt_ids))
        now_s = time.monotonic()
        ids = [f"offline-{next(self._numbers)}" for _ in prompt_ids]
        checked = [
            self._inputs.process(request_id, prompt, wanted, arrival_s=now_s)
            for request_id, prompt, wanted in zip(ids, prompt_ids, each, strict=True)
        ]
        with self._shown_progress(len(ids)) as finished:
            collectors = [
                _Collector(LLMResult(text, prompt, [Completion() for _ in range(wanted.n)]), finished)
                for text, prompt, wanted in zip(texts, prompt_ids, each, strict=True)
            ]
            try:
                for request_id, children, collector, wanted in zip(ids, checked, collectors, each, strict=True):
                    self._outputs.add(request_id, children, collector, requested_max_tokens=wanted.max_tokens)
                    for child in children:
                        self._core.add(child.to_request())
                while self._outputs.num_unfinished:
                    if not self._core.has_work():
                        raise EngineDead("the engine has nothing left to do, but requests have not ended")
                    self._abort_in_core(self._outputs.process(self._core.step(), time.monotonic()))
                    self._raise_first_error(collectors)
            finally:  # a Ctrl-C, an error: the next call starts with an empty engine
                for request_id in self._outputs.unfinished_ids():
                    self._abort_in_core(self._outputs.abort(request_id))
        return [collector.result for collector in collectors]

    def _params_of_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self.default_sampling_params] * number
        if isinstance(params, SamplingParams):
            return [params] * number
        if len(params) != number:
            raise ConfigError(
                f"{number} prompts came with {len(params)} SamplingParams", hint="Give one for all, or one for each."
            )
        return list(params)

    def _abort_in_core(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)

    @staticmethod
    def _raise_first_error(collectors: list[_Collector]) -> None:
        for collector in collectors:
            if collector.error is not None:
                raise collector.error

    @contextmanager
    def _shown_progress(self, number: int) -> Iterator[Callable[[LLMResult], None]]:
        """Yield what to call with each finished result: a bar on a terminal, nothing elsewhere."""
        if not self._progress or not sys.stderr.isatty():
            yield lambda result: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("prompts"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
            task = bar.add_task("prompts", total=number, rate="")
            started_s, num_tokens = time.monotonic(), 0

            def finished(result: LLMResult) -> None:
                nonlocal num_tokens
                num_tokens += sum(len(completion.token_ids) for completion in result.completions)
                rate = num_tokens / max(time.monotonic() - started_s, 1e-9)
                bar.update(task, advance=1, rate=f"{rate:,.0f} tokens/s")

            yield finished
