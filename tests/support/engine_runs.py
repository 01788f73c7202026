"""Run prompts through a whole engine core (scheduler, runner, model) in this process, and collect what it says."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.engine_core import EngineCore
from kvctl.core.request import FinishReason, Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import SchedulerStats, TokenLogprobs
from kvctl.engine.build import build_engine_core
from kvctl.engine.config import DeviceConfig, EngineConfig, EngineInfo, ModelConfig
from kvctl.errors import ConfigError

__all__ = ["ConfigError", "Engine", "Result", "greedy", "start"]


@dataclass
class Result:
    """Everything the engine told about one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class Engine:
    """A core with what building it reported."""

    core: EngineCore
    info: EngineInfo
    lines: list[str]
    stats: list[SchedulerStats] = field(default_factory=list)
    _count: int = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        stagger_steps: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> list[Result]:
        """Add all prompts (every `stagger_steps` steps, or at once), step until all are finished."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        results: dict[str, Result] = {}
        waiting = []
        for prompt, own in zip(prompts, each, strict=True):
            request_id = f"r{self._count}"
            self._count += 1
            results[request_id] = Result()
            waiting.append(Request(request_id, list(prompt), own, eos_token_ids=eos_token_ids))
        if not stagger_steps:
            for request in waiting:
                self.core.add(request)
            waiting = []
        step = 0
        while waiting or self.core.has_work():
            if waiting and step % stagger_steps == 0:
                self.core.add(waiting.pop(0))
            step += 1
            outcome = self.core.step()
            self.stats.append(outcome.stats)
            for output in outcome.outputs:
                result = results[output.request_id]
                result.token_ids += output.new_token_ids
                if output.logprobs is not None:
                    result.logprobs.append(output.logprobs)
                if output.prompt_logprobs is not None:
                    result.prompt_logprobs = output.prompt_logprobs
                if output.finish_reason is not None:
                    result.finish_reason = output.finish_reason
                result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)
                result.num_preemptions = max(result.num_preemptions, output.num_preemptions)
        return list(results.values())


def start(
    folder: Path | str,
    *,
    dtype: Any = "float32",
    max_model_len: int = 256,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    block_size: int = 16,
    num_blocks: int | None = 200,
    enable_prefix_caching: bool = True,
    long_prefill_token_threshold: int = 0,
    load_format: Any = "auto",
    cpu_kernels: Any = "torch",
    num_threads: int | None = None,
    kv_cache_memory_bytes: int | None = None,
    kv_cache_dtype: Any = "auto",
    async_scheduling: bool = True,
    seed: int = 0,
) -> Engine:
    """Build an engine core on the CPU."""
    lines: list[str] = []
    config = EngineConfig(
        model=ModelConfig(folder=str(folder), dtype=dtype, load_format=load_format, seed=seed),
        scheduler=SchedulerConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
        ),
        cache=CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        device=DeviceConfig(
            device="cpu",
            num_threads=num_threads,
            cpu_kernels=cpu_kernels,
            num_gpu_blocks_override=num_blocks,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            kv_cache_dtype=kv_cache_dtype,
        ),
        async_scheduling=async_scheduling,
    )
    core, info = build_engine_core(config, time.monotonic, lines.append)
    return Engine(core, info, lines)


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy sampling that ignores the end token."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)
