"""Steps of the runner on a CUDA device without data: devices agree, only tokens are read back, once a step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvctl.core.block_pool import BlockPool
from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.core.engine_core import EngineCore
from kvctl.core.kv_cache_groups import group_layers
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.scheduler import Scheduler
from kvctl.engine.cascade import CascadeRule
from kvctl.engine.decode_graphs import DecodeGraphs
from kvctl.engine.kv_cache import allocate_kv_cache
from kvctl.engine.layers.linear import TorchLinears
from kvctl.engine.model_runner import TorchModelRunner
from kvctl.engine.models.decoder import build_decoder
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.ops import KVScales
from kvctl.engine.sampler import Sampler, TorchSampling
from tests.support.fake_cuda import DEVICE, Stall, fake_cuda

QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 2,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


class EmptyWeights:
    def load(self, packed: Any) -> torch.Tensor:
        return torch.empty(packed.shape, dtype=torch.bfloat16, device=DEVICE)

    def find(self, name: str) -> None:
        return None


class Rerun:
    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


def build(shape: dict[str, Any], *, graphs: bool = True, kv_dtype: torch.dtype = torch.bfloat16) -> EngineCore:
    """A core on the fake device, as `build_engine_core` makes it on a real one."""
    from kvctl_kernels import triton_sampling
    from kvctl_kernels.triton_ops import TritonOps

    config = parse_decoder_config(shape)
    groups = group_layers(config.windows)
    limits = SchedulerConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64)
    with torch.inference_mode():
        decoder = build_decoder(
            config, EmptyWeights(), TritonOps(DEVICE, arch="sm_90", num_multiprocessors=132), TorchLinears(),
            dtype=torch.bfloat16, device=DEVICE, num_positions=513,
        )  # fmt: skip
        scales = {}
        if kv_dtype.itemsize == 1:
            ones = torch.ones(config.num_kv_heads, device=DEVICE)
            scales = {layer: KVScales(ones, ones) for layer in range(config.num_layers)}
        cache = allocate_kv_cache(
            groups, num_blocks=200, block_size=16, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            dtype=kv_dtype, device=DEVICE, scales=scales,
        )  # fmt: skip
        windowless = [index for index, group in enumerate(groups) if group.window_tokens is None]
        captured = None
        if graphs:
            captured = DecodeGraphs(
                decoder, cache.layers, Rerun(), sizes=[1, 2, 4, 8], max_blocks=33, block_size=16,
                num_groups=len(groups), device=DEVICE, cascade_groups=windowless,
            )  # fmt: skip
    runner = TorchModelRunner(
        decoder, cache, Sampler(config.vocab_size, DEVICE, 0, TorchSampling(triton_sampling.race)),
        max_num_seqs=8, max_model_len=512, num_groups=len(groups), device=DEVICE, decode_graphs=captured,
        cascade=CascadeRule(frozenset(windowless), 2048, 1.0),
    )  # fmt: skip
    manager = KVCacheManager(BlockPool(200, True), CacheConfig(), groups, max_step_tokens=64)
    return EngineCore(Scheduler(limits, manager), runner, lambda: 0.0)


def serve(core: EngineCore, params: list[SamplingParams], shared: int = 0) -> int:
    """Requests of 40 + 5 i tokens; the number of steps."""
    head = [3 + i % 90 for i in range(shared)]
    for i, each in enumerate(params):
        core.add(Request(f"r{i}", head + [5 + i] * (40 + 5 * i - shared), each))
    steps = 0
    while core.has_work():
        core.step()
        steps += 1
    return steps


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, **options)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", [QWEN, GEMMA], ids=["qwen", "gemma"])
def test_a_greedy_step_waits_for_its_tokens_only(shape: dict[str, Any], kv_dtype: torch.dtype, graphs: bool) -> None:
    with fake_cuda() as counts:
        core = build(shape, graphs=graphs, kv_dtype=kv_dtype)
        counts.clear()
        steps = serve(core, [greedy() for _ in range(5)])
    assert steps > 6 and counts["downloads"] <= steps
    assert counts["paged_decode"] > 0 and counts["paged_prefill"] > 0


def test_a_shared_prefix_is_a_cascade_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cuda() as counts:
        core = build(QWEN)
        serve(core, [greedy()] * 2, shared=32)
        counts.clear()
        monkeypatch.setattr(CascadeRule, "pays", lambda *_: False)
        serve(core, [greedy()] * 4, shared=32)
        plain = dict(counts)
        counts.clear()
        monkeypatch.setattr(CascadeRule, "pays", lambda self, requests, tokens: tokens >= 32)
        serve(core, [greedy()] * 4, shared=32)
    assert counts["paged_prefill"] > plain["paged_prefill"], "the prefix of decoding requests goes that way too"


PARAMS = {
    "random": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bans": {
        "temperature": 1.0, "logit_bias": {5: 1.0}, "min_tokens": 2, "bad_words_token_ids": ((7, 7), (9,)),
        "allowed_token_ids": tuple(range(3, 50)), "stop_token_ids": frozenset({11}),
    },
    "logprobs": {"temperature": 0.7, "top_p": 0.9, "logprobs": 5},
    "all logprobs": {"temperature": 0.0, "logprobs": 0},
}  # fmt: skip


@pytest.mark.parametrize("name", [*PARAMS, "together"])
def test_sampling_waits_once_whatever_is_asked(name: str) -> None:
    chosen = list(PARAMS.values()) if name == "together" else [PARAMS[name]] * 3
    with fake_cuda() as counts:
        core = build(QWEN)
        counts.clear()
        steps = serve(core, [SamplingParams(max_tokens=4, ignore_eos=True, **each) for each in chosen])
    assert 0 < counts["downloads"] <= steps


def test_prompt_logprobs_wait_once_for_64_tokens() -> None:
    with fake_cuda() as counts:
        core = build(QWEN)
        counts.clear()
        steps = serve(core, [greedy(prompt_logprobs=3)])
    assert counts["downloads"] <= steps + 1


def test_the_fake_device_notices_what_stalls_a_real_one() -> None:
    with fake_cuda():
        x, mask = torch.ones(4, device=DEVICE), torch.ones(4, device=DEVICE) > 0
        for stalls in (
            lambda: x.tolist(), lambda: x[mask], lambda: x[[1, 2]], lambda: bool(x.sum()), lambda: mask.nonzero(),
            lambda: x.cpu(), lambda: torch.ones(4).to(DEVICE), lambda: torch.tensor([1], device=DEVICE),
            lambda: x.copy_(torch.ones(4)), lambda: x.to("cpu", non_blocking=True),
        ):  # fmt: skip
            with pytest.raises(Stall):
                stalls()
        with pytest.raises(Exception, match="convert all Tensors"):
            x + torch.ones(4)
