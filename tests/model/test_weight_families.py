"""Families that no catalogue model belongs to: counts equal transformers' own, built on the meta device."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_formats import model_format
from kvctl.model.weight_parts import weight_parts
from kvctl.model.weight_size import Parallelism, computed_weight_size
from kvctl.units import GIB

FAMILIES = (
    "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "emu3", "ernie4_5", "exaone", "exaone4", "glm", "glm4",
    "granite", "granitemoe", "helium", "iquestcoder", "jais2", "mellum", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "phi3", "sarvam_moe", "seed_oss", "smollm3", "starcoder2", "youtu", "glm4_moe_lite",
    "ernie4_5_moe", "exaone_moe", "falcon", "falcon_mamba", "flex_olmo", "gpt_bigcode", "granitemoehybrid",
    "granitemoeshared", "kimi_linear", "lfm2", "mamba", "mamba2", "minicpm3", "minimax", "olmo", "phimoe", "solar_open",
    "stablelm",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_familys_default_model_has_the_parameters_that_transformers_builds(family: str) -> None:
    config = CONFIG_MAPPING[family](num_hidden_layers=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = sum({id(p): p.numel() for p in model.parameters()}.values())
    theirs += sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    parts = weight_parts(ModelShape.from_config({**config.to_dict(), "model_type": family}))
    assert parts is not None
    assert sum(part.num_parameters for part in parts) == theirs


BAICHUAN = {"model_type": "baichuan", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
PUBLISHED = {
    "falcon-7b": (
        {"model_type": "falcon", "num_hidden_layers": 32, "hidden_size": 4544, "num_attention_heads": 71,
         "multi_query": True, "parallel_attn": True, "vocab_size": 65_024},
        6_921_720_704,
    ),
    "falcon-40b": (
        {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128,
         "num_kv_heads": 8, "new_decoder_architecture": True, "parallel_attn": True, "vocab_size": 65_024},
        41_303_293_952,
    ),
    "MiniMax-Text-01": (
        {"model_type": "minimax_text_01", "num_hidden_layers": 80, "hidden_size": 6144, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "num_local_experts": 32,
         "num_experts_per_tok": 2, "vocab_size": 200_064, "attn_type_list": ([0] * 7 + [1]) * 10},
        456_089_655_296,
    ),
    "Baichuan2-7B": ({**BAICHUAN, "intermediate_size": 11_008, "vocab_size": 125_696}, 7_505_973_248),
    "Qwen-7B": (
        {**BAICHUAN, "model_type": "qwen", "intermediate_size": 22_016, "vocab_size": 151_936}, 7_721_324_544,
    ),
    "internlm2-7b": (
        {**BAICHUAN, "model_type": "internlm2", "intermediate_size": 14_336, "num_key_value_heads": 8,
         "vocab_size": 92_544, "bias": False},
        7_737_708_544,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_of_models_with_code_of_their_own_are_the_published_ones(name: str) -> None:
    config, published = PUBLISHED[name]
    parts = weight_parts(ModelShape.from_config(config))
    assert parts is not None
    assert sum(part.num_parameters for part in parts) == published


def test_deepseek_v4_is_counted_to_the_last_parameter_and_its_experts_are_in_four_bits() -> None:
    """284,332,230,231 in transformers' DeepseekV4ForCausalLM; the checkpoint takes about 150 GiB."""
    shape = ModelShape.from_config(find_model("deepseek-ai/DeepSeek-V4-Flash").config)
    fmt = model_format(shape.view, "bfloat16")
    size = computed_weight_size(shape, fmt, Parallelism())
    assert size is not None and size.num_parameters == 284_332_230_231
    assert (fmt.name, 140 < size.total_bytes / GIB < 160) == ("fp8", True)
