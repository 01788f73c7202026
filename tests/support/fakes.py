"""Stand-ins that need no model and no torch: an engine that echoes, a tokenizer like Llama 2's, a clock by hand."""

import os
import threading
import time
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import SchedulerConfig
from kvctl.core.engine_core import Clock, EngineCore
from kvctl.core.kv_cache_groups import KVCacheGroup
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import Request
from kvctl.core.scheduler import Scheduler
from kvctl.core.step import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from kvctl.engine.config import DeviceConfig, EngineConfig, EngineInfo, ModelConfig
from kvctl.errors import InvalidRequest, ModelBroken
from tests.support.byte_tokenizer import EOS_ID


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def sentencepiece_like_backend(
    words: Sequence[str] = ("▁hello", "▁world", "hello", "wor", "ld", "é", "."),
) -> tokenizers.Tokenizer:
    """What Llama 2's tokenizer.json looks like: <unk> <s> </s>, 256 byte tokens, pieces with ▁ for a space."""
    pieces = ["▁", *words, *map(chr, range(ord("a"), ord("z") + 1))]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + index for index, piece in enumerate(dict.fromkeys(pieces))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


class EchoModelRunner:
    """Answers with the prompt, over and over; a prompt that starts with a control byte makes it misbehave.

    Byte 1: the step raises. Byte 2: the process ends at once. Byte 3: every step takes 20 ms. Byte 4: the answer
    is the end-of-sequence token after as many tokens as the prompt has.
    """

    def __init__(self) -> None:
        self._token_ids: dict[str, list[int]] = {}
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}
        self._wants_logprobs: dict[str, int] = {}

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in (*plan.finished_request_ids, *plan.preempted_request_ids):
            del self._token_ids[request_id]
        for new in plan.new_requests:
            self._token_ids[new.request_id] = new.token_ids
            self._num_prompt_tokens[new.request_id] = new.num_prompt_tokens
            self._num_computed[new.request_id] = new.num_computed_tokens
            if new.sampling_params.logprobs is not None:
                self._wants_logprobs[new.request_id] = new.sampling_params.logprobs
        output = ModelRunnerOutput([])
        for request_id, num_tokens in zip(plan.request_ids, plan.num_scheduled_tokens, strict=True):
            token_ids = self._token_ids[request_id]
            self._num_computed[request_id] += num_tokens
            if self._num_computed[request_id] < len(token_ids):
                output.sampled_token_ids.append(None)
                continue
            token_id = self._next(token_ids, self._num_prompt_tokens[request_id])
            token_ids.append(token_id)
            output.sampled_token_ids.append(token_id)
            if request_id in self._wants_logprobs:
                output.logprobs[request_id] = TokenLogprobs([token_id, token_id], [-0.5, -0.5], 1)
        return output

    @staticmethod
    def _next(token_ids: list[int], num_prompt_tokens: int) -> int:
        num_output_tokens = len(token_ids) - num_prompt_tokens
        match token_ids[0]:
            case 1:
                raise RuntimeError("the runner was asked to fail")
            case 2:
                os._exit(9)
            case 3:
                time.sleep(0.02)
            case 4 if num_output_tokens == num_prompt_tokens:
                return EOS_ID
        return token_ids[num_output_tokens % num_prompt_tokens]


def engine_config(
    *, folder: str = "fake", max_model_len: int = 512, max_num_seqs: int = 8, num_blocks: int = 129
) -> EngineConfig:
    """A small engine. `folder` "broken" or "bug" makes the builder fail; `num_blocks` includes the null block."""
    return EngineConfig(
        ModelConfig(folder),
        SchedulerConfig(max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=256),
        device=DeviceConfig(num_gpu_blocks_override=num_blocks),
    )


def build_echo_core(config: EngineConfig, clock: Clock, report: Callable[[str], None]) -> tuple[EngineCore, EngineInfo]:
    """The builder of the fake engine: the real core over an `EchoModelRunner`."""
    match config.model.folder:
        case "broken":
            raise ModelBroken("model.safetensors is missing", hint="Fetch it again.")
        case "bug":
            raise ZeroDivisionError("a bug while building")
        case "crash":
            os._exit(7)
        case "slow":
            time.sleep(60)
    num_blocks = config.device.num_gpu_blocks_override or 129
    pool = BlockPool(num_blocks, enable_caching=config.cache.enable_prefix_caching)
    manager = KVCacheManager(pool, config.cache, [KVCacheGroup((0,))])
    report("fake engine: no weights")
    scheduler = config.scheduler
    kv_tokens = (num_blocks - 1) * config.cache.block_size
    info = EngineInfo(
        model_folder=config.model.folder,
        architecture="EchoForCausalLM",
        dtype="float32",
        device="cpu",
        attention_backend="none",
        linear_backend="none",
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_cache_bytes=num_blocks * 1024,
        kv_cache_dtype="bfloat16",
        weight_bytes=0,
        kv_tokens=kv_tokens,
        max_concurrency=kv_tokens / scheduler.max_model_len,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_threads=1,
        load_s=0.0,
    )
    return EngineCore(Scheduler(scheduler, manager), EchoModelRunner(), clock), info


class PickyCore(EngineCore):
    """Refuses requests whose id begins with "refused", trips over those with "bug" while they are added."""

    def add(self, request: Request) -> None:
        if request.request_id.startswith("refused"):
            raise InvalidRequest("not this one", param="request_id")
        if request.request_id.startswith("bug"):
            raise TypeError("a bug while adding")
        super().add(request)


def build_picky_core(
    config: EngineConfig, clock: Clock, report: Callable[[str], None]
) -> tuple[EngineCore, EngineInfo]:
    """Like `build_echo_core`, with a `PickyCore`."""
    core, info = build_echo_core(config, clock, report)
    return PickyCore(core.scheduler, core.runner, clock), info


def build_lingering_core(
    config: EngineConfig, clock: Clock, report: Callable[[str], None]
) -> tuple[EngineCore, EngineInfo]:
    """Like `build_echo_core`, in a process that cannot end: a thread that it must wait for sleeps for a minute."""
    threading.Thread(target=time.sleep, args=(60,)).start()
    return build_echo_core(config, clock, report)
