"""Tables of cosines and sines for rotary position embeddings, one row per position.

Knows no model and no kernel: a RopeConfig in, a table out. The table is a function of the position alone, so what a
token is rotated by never depends on the batch, on chunks or on how far its request has come. Floor 2.

Sources: RoFormer (Su et al., 2021); position interpolation (Chen et al., 2023); YaRN (Peng et al., 2023), sec. 3;
Llama 3.1's frequency scaling as in its config (`rope_type` llama3); values are tested against transformers.
"""

import math

import torch
from torch import Tensor

from kvctl.engine.models.decoder_config import RopeConfig


def _frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**exponents)


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended."""
    plain = _frequencies(rope.theta, head_dim)
    turns = rope.original_max_position_tokens * plain / (2 * math.pi)  # full turns within the trained length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """As llama3, but blended by dimension between two numbers of turns, and cosines and sines enlarged."""
    plain = _frequencies(rope.theta, head_dim)

    def dimension_of(turns: float) -> float:
        return (
            head_dim * math.log(rope.original_max_position_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    scale = rope.attention_factor
    if scale is None:
        if rope.mscale and rope.mscale_all_dim:
            scale = _yarn_scale(rope.factor, rope.mscale) / _yarn_scale(rope.factor, rope.mscale_all_dim)
        else:
            scale = _yarn_scale(rope.factor)
    return plain / rope.factor * ramp + plain * (1 - ramp), scale


def _dynamic_angles(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Past the trained length, position p turns as in a context of p + 1 tokens.

    transformers gives the same when it generates token by token; within one long prompt it rotates all tokens by
    the prompt's length instead, which no cache can follow.
    """
    positions = torch.arange(num_positions, dtype=torch.float64)
    trained = rope.original_max_position_tokens
    length = (positions + 1).clamp_min(trained)
    growth = (rope.factor * length / trained - (rope.factor - 1)) ** (head_dim / (head_dim - 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = (1.0 / (rope.theta * growth[:, None]) ** exponents[None, :]).float()
    return positions.float()[:, None] * frequencies


def build_cos_sin_cache(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> Tensor:
    """Return float32 [num_positions, head_dim]: the cosines of each position's angles, then their sines."""
    scale = 1.0
    if rope.rope_type == "dynamic":
        angles = _dynamic_angles(rope, head_dim, num_positions)
    else:
        if rope.rope_type == "llama3":
            frequencies = _llama3(rope, head_dim)
        elif rope.rope_type == "yarn":
            frequencies, scale = _yarn(rope, head_dim)
        else:
            frequencies = _frequencies(rope.theta, head_dim) / rope.factor  # factor 1 but for "linear"
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(device)
