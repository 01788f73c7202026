"""config.json of each supported family -> DecoderConfig. One function per family, plain reading, no guessing.

Knows no torch and no weights. Both spellings of config.json are read: the old one (`rope_theta` beside
`rope_scaling`) and the one transformers 5 writes (`rope_parameters`, per layer kind where they differ).
Defaults for absent keys are those of the family's config class in transformers 5.24, but for the number of KV heads,
where absent means one for each query head. Floor 2.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from kvctl.engine.models.decoder_config import Activation, DecoderConfig, RopeConfig, RopeType
from kvctl.errors import ModelBroken, ModelNotSupported

Config = Mapping[str, Any]

_LARGEST_COUNT = 2**31 - 1
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _broken(message: str) -> ModelBroken:
    return ModelBroken(f"config.json: {message}", hint="Download the model again, or correct that entry.")


def _count(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST_COUNT:
        raise _broken(f"{key!r} is {value!r}, not a positive whole number")
    return value


def _optional_number(source: Config, key: str) -> float | None:
    value = source.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise _broken(f"{key!r} is {value!r}, not a number")
    return float(value)


def _number(source: Config, key: str, default: float | None = None) -> float:
    value = _optional_number(source, key)
    if value is None:
        value = default
    if value is None:
        raise _broken(f"{key!r} is missing")
    return value


def _positive(source: Config, key: str, default: float | None = None) -> float:
    value = _number(source, key, default)
    if value <= 0:
        raise _broken(f"{key!r} is {value:g}, not a positive number")
    return value


def _soft_cap(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else _positive(config, key)


def _rope(parameters: Config, theta: float, max_position_tokens: int, config: Config) -> RopeConfig:
    rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
    if rope_type not in _ROPE_TYPES:
        raise ModelNotSupported(
            f"rope scaling of type {rope_type!r} is not supported",
            hint=f"Supported are {', '.join(_ROPE_TYPES)}.",
        )
    if parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelNotSupported("partial rotary embeddings are not supported", hint="Choose another model.")
    theta = _number(parameters, "rope_theta", theta)
    if theta <= 1:
        raise _broken(f"'rope_theta' is {theta:g}; the base of rotary embeddings must be over 1")
    if rope_type == "default":
        return RopeConfig(theta)
    trained = max_position_tokens
    if rope_type in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        trained = _count(parameters if config.get(key) is None else config, key, max_position_tokens)
    factor = _optional_number(parameters, "factor")
    if factor is None and rope_type == "yarn":
        factor = max_position_tokens / trained
    if factor is None or factor <= 0:
        raise _broken(f"rope scaling of type {rope_type!r} has the factor {factor!r}")
    low, high = _number(parameters, "low_freq_factor", 1.0), _number(parameters, "high_freq_factor", 4.0)
    if rope_type == "llama3" and low >= high:
        raise _broken(f"'low_freq_factor' {low:g} is not under 'high_freq_factor' {high:g}")
    return RopeConfig(
        theta=theta,
        rope_type=cast("RopeType", rope_type),
        factor=factor,
        original_max_position_tokens=trained,
        low_freq_factor=low,
        high_freq_factor=high,
        attention_factor=_optional_number(parameters, "attention_factor"),
        beta_fast=_positive(parameters, "beta_fast", 32.0),
        beta_slow=_positive(parameters, "beta_slow", 1.0),
        mscale=_optional_number(parameters, "mscale"),
        mscale_all_dim=_optional_number(parameters, "mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
    )


def _rope_of(config: Config, kind: str, theta: float, max_position_tokens: int) -> RopeConfig:
    parameters = config.get("rope_parameters")
    if parameters is None:
        parameters = config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise _broken(f"rope parameters are {parameters!r}, not an object")
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    return _rope(parameters, _number(config, "rope_theta", theta), max_position_tokens, config)


def _activation(config: Config, key: str, default: str) -> Activation:
    name = config.get(key) or default
    if name not in _ACTIVATIONS:
        raise ModelNotSupported(
            f"the activation {name!r} is not supported", hint=f"Supported are {', '.join(_ACTIVATIONS)}."
        )
    return _ACTIVATIONS[name]


def _layer_windows(config: Config, num_layers: int, window: int | None, default: list[str]) -> tuple[int | None, ...]:
    kinds = config.get("layer_types") or default
    if len(kinds) != num_layers:
        raise _broken(f"'layer_types' names {len(kinds)} layers, 'num_hidden_layers' is {num_layers}")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ModelNotSupported(f"layers of type {kind!r} are not supported", hint="Choose another model.")
        if kind == _SLIDING and window is None:
            raise _broken("'layer_types' has sliding layers, but there is no 'sliding_window'")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _common(config: Config, architecture: str, *, default_head_dim: int | None = None) -> dict[str, Any]:
    """The fields that all families spell alike."""
    hidden_size = _count(config, "hidden_size")
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise _broken(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    head_dim = _count(config, "head_dim", default_head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise _broken(f"the head size is {head_dim}; rotary embeddings need an even one")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelNotSupported(
            f"weights quantized with {method!r} are not supported",
            hint="Choose a bfloat16, float16 or float32 version of the model, or a .gguf file.",
        )
    return {
        "architecture": architecture,
        "vocab_size": _count(config, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": _count(config, "intermediate_size"),
        "num_layers": _count(config, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": _positive(config, "rms_norm_eps", 1e-6),
        "attention_scale": head_dim**-0.5,
    }


def _stretched(rope: RopeConfig, max_position_tokens: int) -> int:
    """The longest sequence, as vLLM counts it (config/model.py, 0.32): llama3 states the stretched length already."""
    if rope.rope_type not in ("linear", "dynamic", "yarn"):
        return max_position_tokens
    trained = rope.original_max_position_tokens if rope.rope_type == "yarn" else max_position_tokens
    return max(1, int(trained * rope.factor))


def _llama_like(
    config: Config, fields: dict[str, Any], *, max_position_tokens: int, windows: tuple[int | None, ...]
) -> DecoderConfig:
    rope = _rope_of(config, _FULL, 10_000.0, max_position_tokens)
    return DecoderConfig(
        **{
            "max_position_tokens": _stretched(rope, max_position_tokens),
            "windows": windows,
            "ropes": (rope,) * fields["num_layers"],
            "activation": _activation(config, "hidden_act", "silu"),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
            **fields,
        }
    )


def llama(config: Config, architecture: str) -> DecoderConfig:
    """Llama 2, 3, 3.1, 3.2, Yi, SmolLM2 and everything else saved as LlamaForCausalLM."""
    fields = _common(config, architecture)
    bias = bool(config.get("attention_bias", False))
    fields |= {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bool(config.get("mlp_bias", False))}
    return _llama_like(
        config,
        fields,
        max_position_tokens=_count(config, "max_position_embeddings", 2048),
        windows=(None,) * fields["num_layers"],
    )


def mistral(config: Config, architecture: str) -> DecoderConfig:
    """Mistral: one sliding window in all layers, or none (`sliding_window` null)."""
    fields = _common(config, architecture)
    window = _count(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
    return _llama_like(
        config,
        fields,
        max_position_tokens=_count(config, "max_position_embeddings", 131_072),
        windows=(window,) * fields["num_layers"],
    )


def _qwen_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    window: int | None = None
    if config.get("use_sliding_window", False) and config.get("sliding_window", 4096) is not None:
        window = _count(config, "sliding_window", 4096)
    # layers BELOW max_window_layers attend to everything: the name says the opposite, the code does this
    first_sliding = config.get("max_window_layers", 28) if window is not None else num_layers
    default = [_SLIDING if index >= first_sliding else _FULL for index in range(num_layers)]
    return _layer_windows(config, num_layers, window, default)


def qwen2(config: Config, architecture: str) -> DecoderConfig:
    """Qwen2 and Qwen2.5: biases on q, k and v."""
    fields = _common(config, architecture) | {"qkv_bias": True}
    return _llama_like(
        config,
        fields,
        max_position_tokens=_count(config, "max_position_embeddings", 32_768),
        windows=_qwen_windows(config, fields["num_layers"]),
    )


def qwen3(config: Config, architecture: str) -> DecoderConfig:
    """Qwen3 (dense): a norm over each query and key head; head_dim is free of hidden_size / heads."""
    bias = bool(config.get("attention_bias", False))
    fields = _common(config, architecture, default_head_dim=128)
    fields |= {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return _llama_like(
        config,
        fields,
        max_position_tokens=_count(config, "max_position_embeddings", 32_768),
        windows=_qwen_windows(config, fields["num_layers"]),
    )


def gemma3_text(config: Config, architecture: str) -> DecoderConfig:
    """Gemma 3 text: sliding and full layers with a rope base each, sandwich norms, scaled embeddings."""
    fields = _common(config, architecture, default_head_dim=256)
    num_layers = fields["num_layers"]
    max_position_tokens = _count(config, "max_position_embeddings", 131_072)
    if config.get("use_bidirectional_attention"):
        raise ModelNotSupported(
            "bidirectional attention (an embedding model) is not supported", hint="Choose a model that generates text."
        )
    pattern = _count(config, "sliding_window_pattern", 6)
    windows = _layer_windows(
        config,
        num_layers,
        _count(config, "sliding_window", 4096),
        [_FULL if (index + 1) % pattern == 0 else _SLIDING for index in range(num_layers)],
    )
    full = _rope_of(config, _FULL, 1_000_000.0, max_position_tokens)
    per_kind = config.get("rope_parameters")
    sliding = RopeConfig(_number(config, "rope_local_base_freq", 10_000.0))  # rope_scaling is for the full layers only
    if isinstance(per_kind, Mapping) and isinstance(per_kind.get(_SLIDING), Mapping):
        sliding = _rope(per_kind[_SLIDING], sliding.theta, max_position_tokens, config)
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        **{
            **fields,
            "max_position_tokens": max_position_tokens,
            "windows": windows,
            "ropes": tuple(full if window is None else sliding for window in windows),
            "attention_scale": _positive(config, "query_pre_attn_scalar", 256) ** -0.5,
            "activation": _activation(config, "hidden_activation", "gelu_pytorch_tanh"),
            "tie_word_embeddings": bool(config.get("tie_word_embeddings", True)),
            "qkv_bias": bias,
            "output_bias": bias,
            "qk_norm": True,
            "sandwich_norms": True,
            "norm_plus_one": True,
            "embedding_scale": float(fields["hidden_size"]) ** 0.5,
            "attention_soft_cap": _soft_cap(config, "attn_logit_softcapping"),
            "logit_soft_cap": _soft_cap(config, "final_logit_softcapping"),
            "allows_float16": False,
        }
    )


def gemma3_with_vision(config: Config, architecture: str) -> DecoderConfig:
    """Gemma 3 from 4B up: the text part; tensors of the vision tower stay unread."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise _broken("'text_config' is missing")
    # config.json of these models leaves out what equals the 4B model's defaults in transformers
    defaults = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208}
    return replace(gemma3_text({**defaults, **text}, architecture), name_prefix="language_model.model.")
