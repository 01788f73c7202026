"""Bytes per token: the seeds' figures, and tensor parallelism."""

import json

import pytest

from kvctl.errors import ConfigError
from kvctl.model.dtypes import kv_format
from kvctl.model.kv_cache_spec import (
    KVOptions,
    kv_cache_specs,
    marginal_bytes_per_token,
    request_bytes,
    state_bytes_per_request,
)
from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape
from kvctl.model.profiles import profiles_folder
from kvctl.units import GIB, KIB


def specs_of(name: str, *, tp: int = 1, kv: str = "auto"):
    shape = ModelShape.from_config(find_model(name).config)
    return kv_cache_specs(shape, KVOptions(kv_format(kv, shape.dtype), tp, shape.dtype))


def per_token(name: str, *, tp: int = 1, kv: str = "auto") -> int:
    return marginal_bytes_per_token(specs_of(name, tp=tp, kv=kv))


def test_qwen25_15b_takes_28672_bytes_and_4864_tokens_take_an_eighth_of_a_gib() -> None:
    assert per_token("Qwen/Qwen2.5-1.5B-Instruct") == 28_672
    assert round(4_864 * 28_672 / GIB, 5) == 0.12988


def test_qwen25_7b_takes_56_kib_and_would_take_392_as_mha() -> None:
    assert per_token("Qwen/Qwen2.5-7B-Instruct") == 56 * KIB
    config = {**find_model("Qwen/Qwen2.5-7B-Instruct").config, "num_key_value_heads": 28}
    shape = ModelShape.from_config(config)
    assert marginal_bytes_per_token(kv_cache_specs(shape, KVOptions(kv_format("auto", "bfloat16")))) == 392 * KIB


def test_llama31_8b_takes_128_kib_and_16_gib_at_128k() -> None:
    specs = specs_of("meta-llama/Llama-3.1-8B-Instruct")
    assert marginal_bytes_per_token(specs) == 128 * KIB
    assert request_bytes(specs, 128 * 1024) == 16 * GIB


def test_eighty_layers_of_eight_heads_take_320_kib_a_token() -> None:
    shape = ModelShape.from_config(
        {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    )
    specs = kv_cache_specs(shape, KVOptions(kv_format("bf16", "bfloat16")))
    assert marginal_bytes_per_token(specs) == 327_680
    assert request_bytes(specs, 4_096) == int(1.25 * GIB)  # GiB: 1.34 GB, not 1.28


def test_fp8_halves_16384_tokens_of_llama_70b_to_about_3_gb() -> None:
    n_bytes = request_bytes(specs_of("meta-llama/Llama-3.1-70B-Instruct", kv="fp8"), 16_384)
    assert n_bytes is not None and round(n_bytes / 1e9, 1) == 2.7  # 2.5 GiB; with 1 GiB = 1.07 GB


@pytest.mark.parametrize(
    ("name", "tp", "kv", "expected"),
    [
        ("Qwen/Qwen3-235B-A22B", 4, "auto", 48_128),
        ("Qwen/Qwen3-235B-A22B", 8, "auto", 48_128),  # four heads on eight ranks: replicated
        ("deepseek-ai/DeepSeek-R1", 1, "auto", 70_272),
        ("deepseek-ai/DeepSeek-R1", 8, "auto", 70_272),  # the latent is whole on every rank
        ("nvidia/Kimi-K2.6-NVFP4", 8, "auto", 70_272),
        ("mistralai/Mistral-Small-4-119B-2603", 1, "auto", 23_040),
        ("zai-org/GLM-5", 8, "auto", 100_152),
        ("Qwen/Qwen3-30B-A3B-FP8", 1, "fp8", 49_152),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 4, "auto", 3_072),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 4, "fp8", 1_536),
        ("tiiuae/Falcon-H1-1.5B-Instruct", 1, "auto", 24_576),
        ("openai-community/gpt2", 1, "auto", 36_864),
        ("mosaicml/mpt-7b", 1, "auto", 524_288),
    ],
)
def test_bytes_per_token_are_those_of_printed_logs(name: str, tp: int, kv: str, expected: int) -> None:
    assert per_token(name, tp=tp, kv=kv) == expected


def test_16384_tokens_of_glm_4_5_are_2_9_gib_in_fp8() -> None:
    """The only catalogue model of such a context for which that figure holds: 92 layers x 8 heads x 128."""
    tokens = 16_384
    assert per_token("zai-org/GLM-4.5", kv="fp8") * tokens == 3_087_007_744 == int(2.875 * 2**30)
    found = set()
    for path in (profiles_folder() / "models").glob("*/*.json"):
        shape = ModelShape.from_config(json.loads(path.read_text()))
        specs = kv_cache_specs(shape, KVOptions(kv_format("fp8", shape.dtype), 1, shape.dtype))
        held = marginal_bytes_per_token(specs, tokens) * tokens
        if (shape.max_model_len or 0) >= tokens and "2.9" in (f"{held / 2**30:.1f}", f"{held / 1e9:.1f}"):
            found.add(path.stem)
    assert found == {"GLM-4.5"}


def test_windows_cap_a_long_request() -> None:
    specs = specs_of("google/gemma-3-27b-it")
    layer = 2 * 16 * 128 * 2
    assert request_bytes(specs, 100_000) == layer * (10 * 100_000 + 52 * 1024)


def test_a_window_that_never_binds_counts_as_full() -> None:
    specs = specs_of("LGAI-EXAONE/EXAONE-4.0-32B")
    assert marginal_bytes_per_token(specs, 4096) == 262_144
    assert marginal_bytes_per_token(specs, 131_072) == 262_144 // 4


def test_falcon_h1_state_is_what_llamacpp_prints() -> None:
    shape = ModelShape.from_config(find_model("tiiuae/Falcon-H1-1.5B-Instruct").config)
    specs = kv_cache_specs(shape, KVOptions(kv_format("fp16", "float16"), 1, "float32", state_dtype="float32"))
    state = state_bytes_per_request(specs)
    assert state is not None and round(state / 2**20, 2) == 72.98


@pytest.mark.parametrize("tp", [3, 5, 7, 128])
def test_ranks_must_divide_the_heads(tp: int) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        specs_of("meta-llama/Llama-3.1-8B", tp=tp)


def test_a_lightning_state_is_a_matrix_per_head_in_the_models_own_format() -> None:
    config = {
        "model_type": "minimax_text_01", "num_hidden_layers": 8, "hidden_size": 6144, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "attn_type_list": [0] * 7 + [1], "torch_dtype": "bfloat16",
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    specs = kv_cache_specs(shape, KVOptions(kv_format("auto", shape.dtype), 8, shape.dtype))
    assert state_bytes_per_request(specs) == 7 * 64 * 128 * 128 * 2 // 8
    assert marginal_bytes_per_token(specs) == 2 * 128 * 2  # one of the eight key heads on each of eight GPUs
