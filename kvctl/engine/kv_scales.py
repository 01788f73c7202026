"""Scales of a float8 KV cache, as checkpoints carry them: one number per layer, or one per KV head.

Knows the names that calibration tools write (`...self_attn.k_scale`, `...self_attn.k_proj.k_scale`, and the same for
v); a layer without any has scale 1. Floor 2.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from kvctl.engine.ops import KVScales
from kvctl.errors import ModelBroken


def kv_scale_names(prefix: str, layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names a layer's key scale may have, and its value scale's."""
    own = f"{prefix}layers.{layer}.self_attn."
    return (f"{own}k_scale", f"{own}k_proj.k_scale"), (f"{own}v_scale", f"{own}v_proj.v_scale")


def load_kv_scales(
    find: Callable[[str], Tensor | None], prefix: str, num_layers: int, num_kv_heads: int, device: torch.device
) -> Mapping[int, KVScales]:
    """Read the scales of all layers that have some; `find` returns a stored tensor or None.

    Raises:
        ModelBroken: a scale that is no positive number, or has another count than 1 or the number of KV heads.
    """
    found: dict[int, KVScales] = {}
    for layer in range(num_layers):
        pair = []
        for names in kv_scale_names(prefix, layer):
            stored = next((tensor for name in names if (tensor := find(name)) is not None), None)
            scale = torch.ones(1) if stored is None else stored.detach().float().reshape(-1)
            if scale.numel() not in (1, num_kv_heads) or not bool((scale.isfinite() & (scale > 0)).all()):
                raise ModelBroken(
                    f"{names[0]}: {scale.tolist()} is not a scale of {num_kv_heads} KV heads",
                    hint="Serve with --kv-cache-dtype auto, or download the model again.",
                )
            pair.append((stored is not None, scale.expand(num_kv_heads).contiguous().to(device)))
        if any(is_stored for is_stored, _ in pair):
            found[layer] = KVScales(pair[0][1], pair[1][1])
    return found


def scales_for(dtype: torch.dtype, scales: Mapping[int, KVScales]) -> Mapping[int, KVScales]:
    """What pages of this dtype are scaled by: nothing but float8 is.

    Checkpoints are calibrated for e4m3, which ends at 448. AMD's e4m3fnuz ends at 240: scales twice as large fit.
    """
    if dtype.itemsize > 1:
        return {}
    if dtype is not torch.float8_e4m3fnuz:
        return scales
    return {layer: KVScales(2 * scale.key, 2 * scale.value) for layer, scale in scales.items()}
