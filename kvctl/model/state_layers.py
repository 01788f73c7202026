"""The fixed state of recurrent layers, one function per kind: Mamba 1 and 2, GDN, KDA, lightning, convolutions.

Knows the field names of those layers in a config.json and nothing of attention. Every function returns the
tensors of one layer's state for one request, before tensor parallelism. Floor 0.
"""

from kvctl.errors import ModelBroken
from kvctl.model.config_view import ConfigView
from kvctl.model.layer_shape import StatePart


def _first(view: ConfigView, *names: str) -> int:
    for name in names:
        value = view.optional_int(name)
        if value is not None:
            return value
    raise ModelBroken(f"config.json does not say {' or '.join(names)}", hint="Give the model's full config.json.")


def _ssm_dtype(view: ConfigView) -> str | None:
    value = view.get("mamba_ssm_dtype") or view.get("mamba_ssm_cache_dtype")
    return value if isinstance(value, str) and value != "auto" else None


def mamba1(view: ConfigView) -> tuple[StatePart, ...]:
    """Convolution window and SSM state. Source: Mamba paper (arXiv 2312.00752), sec. 3; `d_inner x d_state`."""
    expand = view.optional_int("mamba_expand") or view.optional_int("expand") or 2
    inner = view.optional_int("intermediate_size") if view.model_type in ("mamba", "falcon_mamba") else None
    inner = inner or expand * view.required_int("hidden_size")
    state = _first(view, "mamba_d_state", "state_size", "ssm_state_size")
    kernel = view.optional_int("mamba_d_conv") or view.optional_int("conv_kernel") or 4
    return (StatePart("conv", inner * (kernel - 1)), StatePart("ssm", inner * state, _ssm_dtype(view)))


def mamba2(view: ConfigView) -> tuple[StatePart, ...]:
    """Convolution window over x, B and C, and one SSM state per head. Source: Mamba-2 paper (arXiv 2405.21060)."""
    heads = _first(view, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    given = (
        view.optional_int("mamba_d_head") or view.optional_int("mamba_head_dim") or view.optional_int("mamba_headdim")
    )
    if given is None:
        expand = view.optional_int("mamba_expand") or view.optional_int("expand") or 2
        given = expand * view.required_int("hidden_size") // heads
    state = _first(view, "mamba_d_state", "ssm_state_size", "state_size")
    groups = (
        view.optional_int("mamba_n_groups") or view.optional_int("mamba_ngroups") or view.optional_int("n_groups") or 1
    )
    kernel = view.optional_int("mamba_d_conv") or view.optional_int("conv_kernel") or 4
    inner = heads * given
    return (
        StatePart("conv", inner * (kernel - 1), None, 2 * state * (kernel - 1), groups),
        StatePart("ssm", inner * state, _ssm_dtype(view) or _family_dtype(view)),
    )


def _family_dtype(view: ConfigView) -> str | None:
    """What a shortened config leaves out: Nemotron-3 (Nemotron-H with experts) keeps its states in float32.

    Checked against the block of 8,320 tokens that vLLM prints for Nemotron-3-Super (issue 48401).
    """
    return "float32" if view.model_type == "nemotron_h" and view.get("num_experts") else None


def gated_delta_net(view: ConfigView) -> tuple[StatePart, ...]:
    """Convolution window over q, k, v and one key x value matrix per value head.

    Source: Gated DeltaNet (arXiv 2412.06464); checked against the block sizes that vLLM prints for Qwen3.5.
    """
    key = _first(view, "linear_num_key_heads") * _first(view, "linear_key_head_dim")
    value_heads, value_dim = _first(view, "linear_num_value_heads"), _first(view, "linear_value_head_dim")
    kernel = view.optional_int("linear_conv_kernel_dim") or 4
    return (
        StatePart("conv", (2 * key + value_heads * value_dim) * (kernel - 1)),
        StatePart("ssm", value_heads * _first(view, "linear_key_head_dim") * value_dim, _ssm_dtype(view)),
    )


def kimi_delta_attention(view: ConfigView) -> tuple[StatePart, ...]:
    """Three convolution windows (q, k, v) and one square matrix per head, in float32. Source: arXiv 2510.26692."""
    nested = view.part("linear_attn_config")
    heads = nested.get("num_heads") or view.get("linear_num_heads")
    dim = nested.get("head_dim") or view.get("linear_head_dim")
    kernel = nested.get("short_conv_kernel_size") or view.get("linear_conv_kernel_dim") or 4
    if not all(isinstance(v, int) and v > 0 for v in (heads, dim, kernel)):
        raise ModelBroken("config.json does not say linear_attn_config.num_heads and head_dim", hint="Give them.")
    return (
        StatePart("conv", 3 * heads * dim * (kernel - 1)),
        StatePart("ssm", heads * dim * dim, "float32"),
    )


def lightning_attention(view: ConfigView) -> tuple[StatePart, ...]:
    """One head_dim x head_dim matrix per head. Source: MiniMax-01 report (arXiv 2501.08313), sec. 2.2.

    In the model's own format: vLLM refuses a float32 state for this kind ("not yet supported").
    """
    return (StatePart("ssm", view.num_heads * view.head_dim**2),)


def short_convolution(view: ConfigView) -> tuple[StatePart, ...]:
    """The last inputs of a gated short convolution. Source: LFM2 (transformers' Lfm2Config, conv_L_cache)."""
    kernel = view.optional_int("conv_L_cache") or 3
    width = view.optional_int("conv_dim") or view.required_int("hidden_size")
    return (StatePart("conv", width * (kernel - 1)),)


def real_gated_lru(view: ConfigView) -> tuple[StatePart, ...]:
    """Convolution window and one number per channel, in float32. Source: Griffin (arXiv 2402.19427)."""
    width = view.optional_int("lru_width") or view.required_int("hidden_size")
    kernel = view.optional_int("conv1d_width") or 4
    return (StatePart("conv", width * (kernel - 1)), StatePart("lru", width, "float32"))
