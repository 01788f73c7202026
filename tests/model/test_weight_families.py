"""Families that no catalogue model belongs to: counts equal transformers' own, built on the meta device."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_parts import weight_parts

FAMILIES = (
    "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "emu3", "ernie4_5", "exaone", "exaone4", "glm", "glm4",
    "granite", "granitemoe", "helium", "iquestcoder", "jais2", "mellum", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "phi3", "sarvam_moe", "seed_oss", "smollm3", "starcoder2", "youtu", "glm4_moe_lite",
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
