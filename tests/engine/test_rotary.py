"""Rotary tables against the frequencies that transformers computes for the same parameters."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvctl.engine.layers.rotary import build_cos_sin_cache
from kvctl.engine.models.decoder_config import RopeConfig

HEAD_DIM = 64
LENGTH = 200
CPU = torch.device("cpu")


def theirs(parameters, positions, seq_len=None, max_position=128):
    """[positions, HEAD_DIM]: cosines then sines, by transformers' own frequencies."""
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=max_position, rope_parameters=dict(parameters)
    )
    kind = parameters["rope_type"]
    if kind == "default":
        frequencies, scale = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, CPU, seq_len=seq_len)
    angles = positions.float()[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


@pytest.mark.parametrize(
    ("parameters", "ours"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, RopeConfig(1e4)),
        ({"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}, RopeConfig(1e5, "linear", 4.0)),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            RopeConfig(5e5, "llama3", 8.0, original_max_position_tokens=32, low_freq_factor=1, high_freq_factor=4),
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
            RopeConfig(1e4, "yarn", 4.0, original_max_position_tokens=32),
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.25,
                "truncate": False,
            },
            RopeConfig(
                1e6,
                "yarn",
                4.0,
                original_max_position_tokens=32,
                beta_fast=16,
                beta_slow=2,
                attention_factor=1.25,
                truncate=False,
            ),
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-all-parameters"],
)
def test_tables_equal_transformers(parameters, ours):
    table = build_cos_sin_cache(ours, HEAD_DIM, LENGTH, CPU)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, theirs(parameters, torch.arange(LENGTH)), rtol=0, atol=3e-5)


def test_dynamic_scaling_is_plain_up_to_the_trained_length_and_grows_with_each_position_after_it():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    table = build_cos_sin_cache(
        RopeConfig(1e4, "dynamic", 4.0, original_max_position_tokens=128), HEAD_DIM, LENGTH, CPU
    )
    plain = theirs({"rope_type": "default", "rope_theta": 1e4}, torch.arange(128))
    torch.testing.assert_close(table[:128], plain, rtol=0, atol=3e-5)
    for position in (128, 150, 199):
        expected = theirs(parameters, torch.tensor([position]), seq_len=position + 1)
        torch.testing.assert_close(table[position : position + 1], expected, rtol=0, atol=3e-5)


def test_a_row_depends_on_its_position_only():
    rope = RopeConfig(1e4, "dynamic", 4.0, original_max_position_tokens=16)
    short, long = (build_cos_sin_cache(rope, HEAD_DIM, length, CPU) for length in (50, LENGTH))
    assert torch.equal(short, long[:50])
