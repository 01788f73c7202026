"""How quantized weights are stored: bits per parameter with scales and zero points, by format.

Knows formats and the `quantization_config` of a checkpoint; no model. Floor 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from kvctl.errors import ConfigError
from kvctl.model.config_view import ConfigView
from kvctl.model.dtypes import element_bits, ggml_bits


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Bits per parameter of linear layers, and of the rest. `only_experts`: dense layers stay unquantized."""

    name: str
    linear_bits: Fraction
    other_bits: Fraction
    only_experts: bool = False
    quantizes_embedding: bool = False
    expert_bits: Fraction | None = None  # of routed experts, where they are stored otherwise than linear layers


def _grouped(bits: int, group: int, scale_bits: int, zero_bits: int = 0) -> Fraction:
    return Fraction(bits) + Fraction(scale_bits + zero_bits, group)


# Source: the tensors of each format as its checkpoints store them.
#   awq, gptq: packed int4, one float16 scale and one packed zero point per group (AutoAWQ, AutoGPTQ)
#   fp8: one byte; per 128 x 128 block (DeepSeek, Qwen) or per channel one float32 scale - under 0.1 % either way
#   nvfp4: one FP8 scale per 16 (NVIDIA ModelOpt); mxfp4: one E8M0 scale per 32 (OCP MX specification 1.0)
#   bitsandbytes nf4: one absmax per 64, itself in 8 bits with a float32 per 256 (QLoRA's double quantization)
_FORMATS: dict[str, Fraction] = {
    "fp8": _grouped(8, 128 * 128, 32),
    "int8": _grouped(8, 4096, 16),
    "w8a8": _grouped(8, 4096, 16),
    "awq": _grouped(4, 128, 16, 4),
    "gptq": _grouped(4, 128, 16, 4),
    "int4": _grouped(4, 128, 16),
    "nvfp4": _grouped(4, 16, 8),
    "mxfp4": _grouped(4, 32, 8),
    "bitsandbytes": Fraction(4) + Fraction(8, 64) + Fraction(32, 64 * 256),
}
_ALIASES = {
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "modelopt_fp4": "nvfp4",
    "modelopt": "fp8",
    "fbgemm_fp8": "fp8",
    "compressed-tensors": "int4",
    "bnb": "bitsandbytes",
    "nf4": "bitsandbytes",
    "smoothquant": "w8a8",
    "quark": "fp8",
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "ptpc_fp8", "mxfp8"), "fp8"),
    **dict.fromkeys(("auto-round", "auto_round", "moe_wna16", "inc"), "int4"),
    **dict.fromkeys(("experts_int8", "int8_per_channel_weight_only"), "int8"),
    **dict.fromkeys(("nvfp4_per_token", "petit_nvfp4"), "nvfp4"),
}


def unquantized(dtype: str) -> WeightFormat:
    """Every parameter in one plain format."""
    bits = Fraction(element_bits(dtype))
    return WeightFormat(dtype, bits, bits)


def named_format(name: str, dtype: str) -> WeightFormat:
    """The format that `--quantization` names: fp8, awq, gptq, nvfp4, mxfp4, int8, bitsandbytes, or a GGUF type.

    Raises:
        ConfigError: not a format known here.
    """
    other = Fraction(element_bits(dtype))
    if name.lower() in ("none", "auto", "bf16", "bfloat16", "fp16", "float16"):
        return unquantized(dtype)
    gguf = name.upper().removeprefix("GGUF-").removeprefix("GGUF:")
    base = gguf.removesuffix("_M").removesuffix("_S").removesuffix("_L") if gguf.count("_") > 1 else gguf
    bits = ggml_bits(gguf) or ggml_bits(base)
    if bits is not None and gguf not in ("MXFP4", "F16", "BF16", "F32"):
        return WeightFormat(gguf, bits, bits, quantizes_embedding=True)
    found = _ALIASES.get(name.lower(), name.lower())
    if found not in _FORMATS:
        raise ConfigError(
            f"--quantization is {name!r}",
            hint="Choose fp8, int8, awq, gptq, int4, nvfp4, mxfp4, bitsandbytes, or a GGUF type like Q4_K_M.",
        )
    return WeightFormat(found, _FORMATS[found], other, only_experts=found == "mxfp4")


def checkpoint_format(quantization: Mapping[str, Any] | None, dtype: str) -> WeightFormat:
    """What a checkpoint's own `quantization_config` says; plain when it has none.

    Raises:
        ConfigError: it names a method that is not known here.
    """
    if not quantization:
        return unquantized(dtype)
    method = str(quantization.get("quant_method", "")).lower()
    other = Fraction(element_bits(dtype))
    algorithm = str(quantization.get("quant_algo") or "").lower()
    weights = quantization.get("weights")
    nested = weights if isinstance(weights, Mapping) else _first_group(quantization)
    bits = quantization.get("bits") or quantization.get("w_bit") or nested.get("num_bits")
    group = quantization.get("group_size") or quantization.get("q_group_size") or nested.get("group_size")
    if method == "bitsandbytes" or quantization.get("load_in_4bit"):
        return named_format("bitsandbytes" if not quantization.get("load_in_8bit") else "int8", dtype)
    if "nvfp4" in algorithm or (bits == 4 and nested.get("type") == "float" and group == 16):
        return named_format("nvfp4", dtype)
    if method == "mxfp4" or "mxfp4" in str(quantization.get("format", "")):
        return named_format("mxfp4", dtype)
    if isinstance(bits, int) and bits in (2, 3, 4, 8) and method in ("awq", "gptq", "compressed-tensors", "auto-round"):
        if bits == 8:
            return named_format("fp8" if nested.get("type") == "float" else "int8", dtype)
        zero = bits if method in ("awq", "gptq") else 0
        size = group if isinstance(group, int) and group > 0 else 4096
        return WeightFormat(f"{method} int{bits} g{size}", _grouped(bits, size, 16, zero), other)
    if method in ("awq", "gptq"):
        return named_format(method, dtype)
    return named_format("fp8" if method in ("fp8", "modelopt", "fbgemm_fp8", "quark", "") else method, dtype)


def model_format(view: ConfigView, dtype: str) -> WeightFormat:
    """The format of a checkpoint's weights; DeepSeek V4's FP8 checkpoints hold their experts in MXFP4.

    Raises:
        ConfigError: the config names a method that is not known here.
    """
    fmt = checkpoint_format(quantization_config(view), dtype)
    experts = view.get("expert_dtype") or ("fp4" if view.model_type == "deepseek_v4" else None)
    return replace(fmt, expert_bits=_FORMATS["mxfp4"]) if fmt.name == "fp8" and experts == "fp4" else fmt


def quantization_config(view: ConfigView) -> Mapping[str, Any]:
    """What the checkpoint says of its quantization, the language model's own first; {} when nothing."""
    raw = view.fields.get("quantization_config") or view.outer.get("quantization_config")
    return raw if isinstance(raw, Mapping) else {}


def has_fp8_kv_scales(view: ConfigView) -> bool:
    """Whether the checkpoint was made for an FP8 KV cache. Source: ModelOpt's and llm-compressor's fields."""
    raw = quantization_config(view)
    scheme = raw.get("kv_cache_scheme") or raw.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return scheme == "FP8"


def _first_group(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = quantization.get("config_groups")
    if isinstance(groups, Mapping):
        for group in groups.values():
            if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
                weights: Mapping[str, Any] = group["weights"]
                return weights
    return {}
