"""Parameters of the feed-forward part of a layer: dense MLP, routed and shared experts, router.

Knows which layers of which family are sparse. Floor 0.
"""

from collections.abc import Callable

from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import LayerKind, LayerShape
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_mixers import flag
from kvctl.model.weight_traits import Traits, WeightPart

# Families whose config leaves the width out: four times the hidden size, or as they name it.
FFN_WIDTH: dict[str, Callable[[ConfigView], int]] = {
    "gpt2": lambda view: 4 * view.required_int("hidden_size"),
    "gptj": lambda view: 4 * view.required_int("hidden_size"),
    "bloom": lambda view: 4 * view.required_int("hidden_size"),
    "gpt_bigcode": lambda view: 4 * view.required_int("hidden_size"),
    **dict.fromkeys(("falcon", "refinedweb", "refinedwebmodel"), lambda view: 4 * view.required_int("hidden_size")),
    "solar_open": lambda view: view.required_int("moe_intermediate_size"),
    "mpt": lambda view: (view.optional_int("expansion_ratio") or 4) * view.required_int("hidden_size"),
    "qwen3_5_moe": lambda view: view.required_int("moe_intermediate_size"),
    "qwen3_5_moe_text": lambda view: view.required_int("moe_intermediate_size"),
}
NO_FFN = frozenset({"mamba", "falcon_mamba", "mamba2"})  # a mixer is all that a layer has
_SPARSE_FROM_FIRST = frozenset({"mixtral", "minimax_m2", "gpt_oss", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"})


def _width(view: ConfigView, family: str) -> int:
    given = view.optional_int("intermediate_size")
    if given is None and family in FFN_WIDTH:
        return FFN_WIDTH[family](view)
    width = given or view.required_int("intermediate_size")
    if family == "qwen":  # the first Qwen counts both halves of its gated width
        return width // 2
    return _lfm2_width(view, width) if family == "lfm2" else width


def _lfm2_width(view: ConfigView, width: int) -> int:
    """Two thirds of the width, times a factor, in multiples. Source: transformers' Lfm2MLP."""
    if not view.fields.get("block_auto_adjust_ff_dim", True):
        return width
    factor = view.fields.get("block_ffn_dim_multiplier")
    wanted = int((factor if isinstance(factor, int | float) else 1) * (2 * width // 3))
    multiple = view.optional_int("block_multiple_of") or 256
    return -(-wanted // multiple) * multiple


def is_sparse(view: ConfigView, family: str, index: int) -> bool:
    """Whether a layer's feed-forward part is a mixture of experts."""
    if not view.get("num_experts"):
        return False
    listed = view.strings("mlp_layer_types")
    if listed is not None and index < len(listed):
        return listed[index] == "sparse"
    if family in ("llama4", "llama4_text"):
        return (index + 1) % (view.optional_int("interleave_moe_layer_step") or 1) == 0
    if family == "jamba":
        period = view.optional_int("expert_layer_period") or 2
        offset = view.fields.get("expert_layer_offset", 1)
        return bool(index % period == offset)
    if family in _SPARSE_FROM_FIRST:
        return True
    if family == "ernie4_5_moe":
        first, last = view.count("moe_layer_start_index"), view.count("moe_layer_end_index")
        period = view.optional_int("moe_layer_interval") or 1
        return (index + 1) % period == 0 and first <= index and (last <= 0 or index <= last)
    if index in (view.ints("mlp_only_layers") or []) or index < view.count("first_k_dense_replace"):
        return False
    frequency = view.fields.get("moe_layer_freq")
    if isinstance(frequency, list):
        return index < len(frequency) and bool(frequency[index])
    if family.startswith("qwen"):
        return (index + 1) % (view.optional_int("decoder_sparse_step") or 1) == 0
    return index % (frequency if isinstance(frequency, int) and frequency > 0 else 1) == 0


def feed_forward(
    view: ConfigView, shape: ModelShape, traits: Traits, index: int, shapes: list[LayerShape]
) -> list[WeightPart]:
    """The feed-forward parts of one layer; none where the layer is a mixer alone.

    Raises:
        ModelBroken: a width is missing.
    """
    family, hidden = shape.family, view.required_int("hidden_size")
    if family in NO_FFN:
        return []
    if family == "nemotron_h":
        return _nemotron(view, index, shapes)
    alongside = view.count("shared_intermediate_size")  # Granite's MLP beside the experts, or instead of them
    if alongside and not view.get("num_experts"):
        return [_dense("shared mlp", view, traits, hidden, alongside, index)]
    if not is_sparse(view, family, index):
        width = _width(view, family)
        if family in ("llama4", "llama4_text"):
            width = view.optional_int("intermediate_size_mlp") or 2 * width
        return [_dense("mlp", view, traits, hidden, width, index)]
    return _experts(view, family, traits, hidden, index)


def _dense(name: str, view: ConfigView, traits: Traits, hidden: int, width: int, index: int) -> WeightPart:
    matrices = 3 if traits.gated else 2
    bias = ((matrices - 1) * width + hidden) if flag(traits.mlp_bias, view, traits, "mlp_bias") else 0
    return WeightPart(name, matrices * hidden * width + bias, "split", True, index)


def _experts(view: ConfigView, family: str, traits: Traits, hidden: int, index: int) -> list[WeightPart]:
    count = view.required_int("num_experts")
    llama4 = family in ("llama4", "llama4_text")
    width = (None if llama4 else view.optional_int("moe_intermediate_size")) or _width(view, family)
    each = 3 * hidden * width + (2 * width + hidden if traits.expert_bias else 0)
    router = hidden * count + (count if traits.router_bias else 0)
    parts = [
        WeightPart("experts", count * each, "experts", True, index),
        WeightPart("router", router, "whole", False, index),
    ]
    shared_width = view.count("shared_expert_intermediate_size")
    if shared_width:  # Qwen's shared expert has a gate of its own
        parts.append(WeightPart("shared expert", 3 * hidden * shared_width, "split", True, index))
        parts.append(WeightPart("shared gate", hidden, "whole", False, index))
    else:
        shared = 1 if llama4 else view.count("n_shared_experts")
        alongside = view.count("shared_intermediate_size")
        if alongside:
            parts.append(WeightPart("shared mlp", 3 * hidden * alongside, "split", True, index))
        if shared:
            parts.append(WeightPart("shared expert", 3 * hidden * width * shared, "split", True, index))
    return parts


def _nemotron(view: ConfigView, index: int, shapes: list[LayerShape]) -> list[WeightPart]:
    """Nemotron-H: a layer is a mixer or a feed-forward part, never both; matrices come in pairs (no gate)."""
    if shapes[0].kind is not LayerKind.NONE:
        return []
    pattern = view.fields.get("hybrid_override_pattern")
    names = list(pattern) if isinstance(pattern, str) else (view.strings("layers_block_type") or [])
    hidden = view.required_int("hidden_size")
    if index < len(names) and names[index] in ("E", "moe"):
        count, width = view.required_int("num_experts"), view.required_int("moe_intermediate_size")
        shared = view.required_int("moe_shared_expert_intermediate_size") * max(1, view.count("n_shared_experts"))
        latent = view.optional_int("moe_latent_size")
        inner = latent or hidden
        parts = [
            WeightPart("experts", count * 2 * inner * width, "experts", True, index),
            WeightPart("router", (hidden + 1) * count, "whole", False, index),
            WeightPart("shared expert", 2 * hidden * shared, "split", True, index),
        ]
        if latent:
            parts.append(WeightPart("latent", 2 * hidden * latent, "whole", True, index))
        return parts
    return [WeightPart("mlp", 2 * hidden * view.required_int("intermediate_size"), "split", True, index)]
