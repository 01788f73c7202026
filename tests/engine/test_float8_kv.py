"""A float8 KV cache end to end on the CPU: half the bytes, nearly the same model, scales from the checkpoint."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.kv_scales import load_kv_scales, scales_for
from kvctl.errors import ModelBroken
from tests.support import tiny_models
from tests.support.engine_runs import greedy, start

PROMPTS = [[3 + (i * 11 + j) % 100 for j in range(20 + 13 * i)] for i in range(4)]


def logprobs_of(folder: Path, **options: object) -> torch.Tensor:
    """Log probabilities of a fixed text's tokens."""
    text = [3 + (7 * j * j + j) % 120 for j in range(120)]
    engine = start(folder, **options)
    result = engine.run([text], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    return torch.tensor([entry.logprobs[0] for entry in result.prompt_logprobs[1:]])


@pytest.mark.parametrize("cpu_kernels", ["torch", "auto"])
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("fp8", 0.15), ("fp8_e4m3", 0.15), ("fp8_e5m2", 0.3)])
def test_float8_costs_little_accuracy(tmp_path: Path, kv_dtype: str, tolerance: float, cpu_kernels: str) -> None:
    tiny_models.save(tiny_models.LLAMA, tmp_path)
    exact = logprobs_of(tmp_path, cpu_kernels=cpu_kernels)
    stored = logprobs_of(tmp_path, kv_cache_dtype=kv_dtype, cpu_kernels=cpu_kernels)
    difference = (exact - stored).abs().mean()
    assert 0 < difference < tolerance


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_the_same_memory_holds_twice_the_tokens(tiny: tiny_models.TinyModel, tmp_path: Path) -> None:
    tiny_models.save(tiny, tmp_path)
    memory = 1 << 20
    infos = [
        start(tmp_path, dtype="bfloat16", num_blocks=None, kv_cache_memory_bytes=memory, kv_cache_dtype=dtype).info
        for dtype in ("auto", "fp8")
    ]
    assert infos[1].num_blocks == pytest.approx(2 * infos[0].num_blocks, abs=1)
    assert [info.kv_cache_dtype for info in infos] == ["bfloat16", "float8_e4m3fn"]
    assert all(info.kv_cache_bytes <= memory for info in infos)


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_float8_tokens_do_not_depend_on_batching_chunks_or_preemption(
    tiny: tiny_models.TinyModel, tmp_path: Path
) -> None:
    tiny_models.save(tiny, tmp_path)

    def tokens(**options: object) -> list[list[int]]:
        stagger = options.pop("stagger_steps", 0)
        engine = start(tmp_path, kv_cache_dtype="fp8", **options)
        return [r.token_ids for r in engine.run(PROMPTS, greedy(24), stagger_steps=stagger)]

    want = tokens()
    assert tokens(stagger_steps=5) == want
    assert tokens(max_num_batched_tokens=16, max_num_seqs=8) == want
    assert tokens(max_num_seqs=1) == want


def with_scales(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors | scales, folder / "model.safetensors", metadata={"format": "pt"})


def test_scales_of_the_checkpoint_are_used_and_only_with_float8(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.LLAMA, tmp_path)
    exact = logprobs_of(tmp_path)
    plain = logprobs_of(tmp_path, kv_cache_dtype="fp8")
    layers = range(3)
    with_scales(tmp_path, {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.013) for i in layers for x in "kv"})
    assert torch.equal(logprobs_of(tmp_path), exact)
    scaled = logprobs_of(tmp_path, kv_cache_dtype="fp8")
    assert not torch.equal(scaled, plain) and (scaled - exact).abs().mean() < 0.15
    # a scale so small that everything saturates must be visible: it is really applied
    tiny_models.save(tiny_models.LLAMA, tmp_path)
    with_scales(tmp_path, {f"model.layers.{i}.self_attn.v_scale": torch.tensor(1e-5) for i in layers})
    assert (logprobs_of(tmp_path, kv_cache_dtype="fp8") - exact).abs().mean() > 0.3


def test_scales_per_head_are_read_and_bad_ones_refused() -> None:
    stored = {
        "m.layers.0.self_attn.k_scale": torch.tensor([1.0, 2.0]),
        "m.layers.0.self_attn.v_scale": torch.tensor(3.0),
    }
    scales = load_kv_scales(stored.get, "m.", 2, 2, torch.device("cpu"))
    assert list(scales) == [0]
    assert scales[0].key.tolist() == [1.0, 2.0] and scales[0].value.tolist() == [3.0, 3.0]
    for bad in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.0), torch.tensor(float("nan"))):
        with pytest.raises(ModelBroken, match="not a scale of 2 KV heads"):
            load_kv_scales({"m.layers.0.self_attn.k_scale": bad}.get, "m.", 1, 2, torch.device("cpu"))


def test_scales_belong_to_float8_pages_and_amds_kind_needs_larger_ones() -> None:
    stored = {"m.layers.0.self_attn.k_scale": torch.tensor([1.0, 2.0])}
    scales = load_kv_scales(stored.get, "m.", 1, 2, torch.device("cpu"))
    assert scales_for(torch.bfloat16, scales) == {}
    assert scales_for(torch.float8_e4m3fn, scales) == scales
    doubled = scales_for(torch.float8_e4m3fnuz, scales)[0]
    assert doubled.key.tolist() == [2.0, 4.0] and doubled.value.tolist() == [2.0, 2.0]
