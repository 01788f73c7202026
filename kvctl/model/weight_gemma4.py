"""Parameters of Gemma 4's text model: two head sizes, keys that are also values, shared caches, per-layer inputs.

Knows the matrices of transformers' Gemma4TextModel; counts are compared with it in the tests. Floor 0.
"""

from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import LayerKind, LayerShape
from kvctl.model.weight_traits import WeightPart


def outside_layers(view: ConfigView, num_layers: int) -> list[WeightPart]:
    """The embedding of per-layer inputs and its projection, where the model has them (E2B, E4B)."""
    width = view.count("hidden_size_per_layer_input")
    if not width:
        return []
    rows, hidden = view.required_int("vocab_size_per_layer_input"), view.required_int("hidden_size")
    return [
        WeightPart("per-layer embedding", rows * num_layers * width, "vocab", False),
        WeightPart("per-layer projection", hidden * num_layers * width + width, "whole", True),
    ]


def layer_parts(view: ConfigView, layer: LayerShape) -> list[WeightPart]:
    """One decoder layer."""
    hidden, heads, index = view.required_int("hidden_size"), view.num_heads, layer.index
    dim, kv_heads = layer.key_dim, layer.num_kv_heads
    is_shared = layer.kind is LayerKind.SHARED
    key_is_value = bool(view.fields.get("attention_k_eq_v")) and layer.window_tokens is None
    parts = [
        WeightPart("norms", 4 * hidden + 1, "whole", False, index),  # and one scalar per layer
        WeightPart("attention q", hidden * heads * dim, "split", True, index),
        WeightPart("attention o", heads * dim * hidden, "split", True, index),
        WeightPart("q norm", dim, "whole", False, index),
    ]
    if not is_shared:
        parts.append(
            WeightPart("attention k,v", hidden * kv_heads * dim * (1 if key_is_value else 2), "kv", True, index)
        )
        parts.append(WeightPart("k norm", dim, "whole", False, index))
    width = view.required_int("intermediate_size")
    if is_shared and view.fields.get("use_double_wide_mlp"):
        width *= 2
    parts.append(WeightPart("mlp", 3 * hidden * width, "split", True, index))
    if view.fields.get("enable_moe_block"):
        count, expert = view.required_int("num_experts"), view.required_int("moe_intermediate_size")
        parts.append(WeightPart("experts", count * 3 * hidden * expert, "experts", True, index))
        parts.append(WeightPart("router", hidden * count + hidden + count + 3 * hidden, "whole", False, index))
    per_layer = view.count("hidden_size_per_layer_input")
    if per_layer:
        parts.append(WeightPart("per-layer input", 2 * hidden * per_layer + hidden, "whole", True, index))
    return parts
