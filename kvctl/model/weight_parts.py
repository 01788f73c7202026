"""Parameters of a model's parts, computed from its config.json: what each part is, how ranks share it.

Knows which parts a decoder has; no bytes and no files (weight_size.py turns parts into bytes). A family that is
not in TRAITS has no count here: nothing is guessed. Floor 0.
"""

from kvctl.model import weight_deepseek_v4, weight_gemma4
from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import LayerShape
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_ffn import FFN_WIDTH, NO_FFN, feed_forward
from kvctl.model.weight_mixers import MIXERS, attention
from kvctl.model.weight_traits import TRAITS, Traits, WeightPart

_GEMMA4 = frozenset({"gemma4", "gemma4_text", "gemma4_unified_text"})


def weight_parts(shape: ModelShape) -> tuple[WeightPart, ...] | None:
    """Every part of the language model; None when the family's matrices are not known here.

    Raises:
        ModelBroken: a field that the count needs is missing or impossible.
    """
    traits = TRAITS.get(shape.family)
    view = shape.view
    if traits is None or not view.get("vocab_size") or not view.get("hidden_size") or _is_other_design(view):
        return None
    has_width = shape.family in FFN_WIDTH or shape.family in NO_FFN or shape.family == "deepseek_v4"
    if view.get("intermediate_size") is None and not has_width:
        return None
    hidden = view.required_int("hidden_size")
    vocab = view.required_int("vocab_size")
    norm = hidden * (2 if traits.norm_bias else 1)
    parts = [WeightPart("embedding", vocab * (view.optional_int("word_embed_proj_dim") or hidden), "vocab", False)]
    if traits.position_offset is not None:
        rows = view.required_int("max_position_embeddings" if shape.family == "opt" else "n_positions")
        parts.append(WeightPart("positions", (rows + traits.position_offset) * hidden, "whole", False))
    if traits.embed_norm:
        parts.append(WeightPart("embedding norm", norm, "whole", False))
    if traits.final_norm:
        parts.append(WeightPart("final norm", norm, "whole", False))
    if not _is_tied(view, traits):
        head_bias = vocab if traits.head_bias or view.fields.get("lm_head_bias") else 0
        parts.append(WeightPart("lm_head", vocab * hidden + head_bias, "vocab", False))
    by_layer: dict[int, list[LayerShape]] = {}
    for layer in shape.layers:
        by_layer.setdefault(layer.index, []).append(layer)
    if shape.family in _GEMMA4:
        parts += weight_gemma4.outside_layers(view, shape.num_layers)
        return tuple(parts + [part for layer in shape.layers for part in weight_gemma4.layer_parts(view, layer)])
    if shape.family == "deepseek_v4":
        parts += weight_deepseek_v4.outside_layers(view)
        return tuple(parts + [part for layer in shape.layers for part in weight_deepseek_v4.layer_parts(view, layer)])
    for index, shapes in by_layer.items():
        parts.append(WeightPart("norms", _norms(view, shape.family, traits) * norm, "whole", False, index))
        for layer in shapes:
            parts += MIXERS.get(layer.label or layer.kind.value, attention)(view, shape, traits, layer)
        parts += feed_forward(view, shape, traits, index, shapes)
    return tuple(parts)


def _is_other_design(view: ConfigView) -> bool:
    """Kimi K3 goes by Kimi-Linear's rules for its cache, but its gates and experts are others."""
    return bool(view.part("linear_attn_config").get("use_full_rank_gate"))


def _norms(view: ConfigView, family: str, traits: Traits) -> int:
    """Norms of a layer; Falcon has one where attention and MLP run side by side, two in its newer design."""
    if family not in ("falcon", "refinedweb", "refinedwebmodel"):
        return traits.norms
    if view.fields.get("new_decoder_architecture"):
        return view.optional_int("num_ln_in_parallel_attn") or 2
    return 1 if view.fields.get("parallel_attn", True) else 2


def _is_tied(view: ConfigView, traits: Traits) -> bool:
    value = view.fields.get("tie_word_embeddings")
    value = view.outer.get("tie_word_embeddings") if value is None else value
    return traits.tied if value is None else bool(value)
