"""Parameters of what mixes tokens in a layer: attention, MLA with its indexer, GDN, Mamba 1 and 2.

Knows the shapes of those matrices by the names in a config.json; one function per kind. Floor 0.
"""

from collections.abc import Callable

from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import LayerKind, LayerShape
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_traits import Traits, WeightPart


def flag(choice: bool | None, view: ConfigView, traits: Traits, field: str) -> bool:
    """A family's fixed choice, or what the config's `field` (or the family's own) says where it is left open."""
    return bool(view.fields.get(traits.bias_field or field)) if choice is None else choice


Mixer = Callable[[ConfigView, ModelShape, Traits, LayerShape], list[WeightPart]]


def attention(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """Separate or fused q, k, v and the output projection, with biases and q/k norms."""
    if layer.kind in (LayerKind.NONE, LayerKind.CROSS):
        return []
    hidden, heads = view.required_int("hidden_size"), view.num_heads
    index, kv_heads, dim, value_dim = layer.index, layer.num_kv_heads, layer.key_dim, layer.value_dim
    qkv_bias = flag(traits.qkv_bias, view, traits, "attention_bias") or bool(view.fields.get("use_qkv_bias"))
    o_bias = flag(traits.o_bias, view, traits, "attention_bias")
    gate = 2 if shape.family.startswith(("qwen3_next", "qwen3_5")) else 1  # their queries carry an output gate
    query = heads * dim * gate
    parts = [
        WeightPart("attention q", hidden * query + (query if qkv_bias else 0), "split", True, index),
        WeightPart("attention k,v", (hidden + int(qkv_bias)) * kv_heads * (dim + value_dim), "kv", True, index),
        WeightPart("attention o", heads * value_dim * hidden + (hidden if o_bias else 0), "split", True, index),
    ]
    uses_norm = view.fields.get("use_qk_norm", shape.family == "minimax_m2") or traits.qk_norm
    if traits.qk_norm == "full":
        parts.append(WeightPart("q,k norms", (heads + kv_heads) * dim, "split", False, index))
    elif uses_norm and shape.family not in ("llama4", "llama4_text"):  # Llama 4's q/k norm has no weights
        parts.append(WeightPart("q,k norms", 2 * dim, "whole", False, index))
    if traits.sinks:
        parts.append(WeightPart("sinks", heads, "split", False, index))
    return parts


def _latent(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """MLA's down and up projections, and DSA's indexer. Source: DeepSeek-V2 (arXiv 2405.04434) sec. 2.1."""
    hidden, heads, index = view.required_int("hidden_size"), view.num_heads, layer.index
    rank, rope = view.required_int("kv_lora_rank"), view.count("qk_rope_head_dim")
    nope, value = view.required_int("qk_nope_head_dim"), view.required_int("v_head_dim")
    query_rank = view.optional_int("q_lora_rank")
    parts = [
        WeightPart("latent down", hidden * (rank + rope), "whole", True, index),
        WeightPart("latent norm", rank, "whole", False, index),
        WeightPart("latent up", rank * heads * (nope + value), "split", True, index),
        WeightPart("attention o", heads * value * hidden, "split", True, index),
    ]
    if query_rank is None:
        parts.append(WeightPart("attention q", hidden * heads * (nope + rope), "split", True, index))
    else:
        parts.append(WeightPart("query down", hidden * query_rank, "whole", True, index))
        parts.append(WeightPart("query norm", query_rank, "whole", False, index))
        parts.append(WeightPart("query up", query_rank * heads * (nope + rope), "split", True, index))
    if layer.indexer_bytes and query_rank is not None:
        width, index_heads = view.required_int("index_head_dim"), view.required_int("index_n_heads")
        indexer = query_rank * index_heads * width + hidden * width + 2 * width + hidden * index_heads
        parts.append(WeightPart("indexer", indexer, "whole", True, index))
    return parts


def _gated_delta(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """Projections of q, k, v, z, b and a, the convolution, and per-head decay. Source: Qwen3-Next's config."""
    hidden, index = view.required_int("hidden_size"), layer.index
    key = view.required_int("linear_num_key_heads") * view.required_int("linear_key_head_dim")
    value_heads, value_dim = view.required_int("linear_num_value_heads"), view.required_int("linear_value_head_dim")
    value = value_heads * value_dim
    kernel = view.optional_int("linear_conv_kernel_dim") or 4
    return [
        WeightPart("linear in", hidden * (2 * key + 2 * value + 2 * value_heads), "split", True, index),
        WeightPart("linear conv", (2 * key + value) * kernel, "split", False, index),
        WeightPart("linear decay", 2 * value_heads, "split", False, index),
        WeightPart("linear norm", value_dim, "whole", False, index),
        WeightPart("linear out", value * hidden, "split", True, index),
    ]


def _kimi_delta(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """q, k, v with their convolutions, low-rank gates, per-head decay. Source: Kimi-Linear's config."""
    hidden, index, nested = view.required_int("hidden_size"), layer.index, view.part("linear_attn_config")
    heads = int(nested.get("num_heads") or view.required_int("linear_num_heads"))
    dim = int(nested.get("head_dim") or view.required_int("linear_head_dim"))
    kernel = int(nested.get("short_conv_kernel_size") or view.optional_int("linear_conv_kernel_dim") or 4)
    inner = heads * dim
    return [
        WeightPart("linear in", 3 * hidden * inner + hidden * heads, "split", True, index),
        WeightPart("linear conv", 3 * inner * kernel, "split", False, index),
        WeightPart("linear gates", 2 * (hidden + inner) * dim, "split", True, index),
        WeightPart("linear decay", inner + heads, "split", False, index),
        WeightPart("linear norm", dim, "whole", False, index),
        WeightPart("linear out", inner * hidden, "split", True, index),
    ]


def _lightning(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """Fused q, k, v, an output gate, a norm and the output projection. Source: MiniMax-Text-01's config."""
    hidden, inner = view.required_int("hidden_size"), view.num_heads * view.head_dim
    return [
        WeightPart("linear in", 4 * hidden * inner, "split", True, layer.index),
        WeightPart("linear norm", inner, "split", False, layer.index),
        WeightPart("linear out", inner * hidden, "split", True, layer.index),
    ]


def _short_conv(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """LFM2's gated short convolution: in (three parts) and out projections, one kernel per channel."""
    hidden, kernel = view.required_int("hidden_size"), view.optional_int("conv_L_cache") or 3
    return [
        WeightPart("conv in and out", 4 * hidden * hidden, "split", True, layer.index),
        WeightPart("conv", hidden * kernel, "split", False, layer.index),
    ]


def _mamba2(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """In and out projections, convolution with bias, decay, skip and time step, and the gated norm."""
    hidden, index = view.required_int("hidden_size"), layer.index
    heads = view.optional_int("mamba_n_heads") or view.optional_int("mamba_num_heads") or view.num_heads
    dim = view.optional_int("mamba_d_head") or view.optional_int("mamba_head_dim") or view.head_dim
    state = view.optional_int("mamba_d_state") or view.optional_int("ssm_state_size") or view.required_int("state_size")
    groups = view.optional_int("mamba_n_groups") or view.optional_int("n_groups") or 1
    kernel = view.optional_int("mamba_d_conv") or view.optional_int("conv_kernel") or 4
    inner = heads * dim
    convolved = inner + 2 * groups * state
    bias = 0 if view.fields.get("use_conv_bias", view.fields.get("mamba_conv_bias", True)) is False else convolved
    return [
        WeightPart("mamba in", hidden * (inner + convolved + heads), "split", True, index),
        WeightPart("mamba conv", convolved * kernel + bias, "split", False, index),
        WeightPart("mamba decay", 3 * heads, "split", False, index),
        WeightPart("mamba norm", 0 if view.fields.get("mamba_rms_norm") is False else inner, "split", False, index),
        WeightPart("mamba out", inner * hidden, "split", True, index),
    ]


def _mamba1(view: ConfigView, shape: ModelShape, traits: Traits, layer: LayerShape) -> list[WeightPart]:
    """A Mamba block: its projections, convolution and time-step rank; Jamba's has inner norms."""
    hidden, index = view.required_int("hidden_size"), layer.index
    inner = (view.optional_int("mamba_expand") or view.optional_int("expand") or 2) * hidden
    state = view.optional_int("mamba_d_state") or view.required_int("state_size")
    kernel = view.optional_int("mamba_d_conv") or view.optional_int("conv_kernel") or 4
    given = view.get("mamba_dt_rank") or view.get("time_step_rank")
    rank = given if isinstance(given, int) else -(-hidden // 16)
    norms = rank + 2 * state if shape.family == "jamba" else 0
    return [
        WeightPart("mamba in", hidden * 2 * inner, "split", True, index),
        WeightPart("mamba conv", inner * (kernel + 1), "split", False, index),
        WeightPart("mamba x", inner * (rank + 2 * state), "split", True, index),
        WeightPart("mamba dt", rank * inner + inner, "split", True, index),
        WeightPart("mamba decay", inner * state + inner, "split", False, index),
        WeightPart("mamba norms", norms, "whole", False, index),
        WeightPart("mamba out", inner * hidden, "split", True, index),
    ]


MIXERS: dict[str, Mixer] = {
    "mla": _latent,
    "dsa": _latent,
    "dsa shared": _latent,
    "gdn": _gated_delta,
    "kda": _kimi_delta,
    "lightning": _lightning,
    "conv": _short_conv,
    "mamba2": _mamba2,
    "mamba1": _mamba1,
}
