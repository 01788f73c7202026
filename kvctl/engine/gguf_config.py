"""From GGUF metadata to a Hugging Face config.json and to the names and shapes of its weights.

Knows the architectures that kvctl serves and how llama.cpp's converter changed their tensors: query and key rows of
Llama are permuted, Gemma's norm weights have 1 added. Does not read tensors and does not know tokenizers. Floor 2.

Source: llama.cpp, gguf-py/gguf/constants.py (key names) and convert_hf_to_gguf.py (what was changed), read 2026-11.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvctl.engine.gguf_file import GgufFile
from kvctl.errors import ModelBroken, ModelNotSupported

SUPPORTED: Final = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_GEMMA3_LOCAL_ROPE_THETA: Final = 10_000.0  # not in the file; Gemma 3 report, section 2.1
_GEMMA3_LAYERS_PER_FULL: Final = 6  # five sliding layers, then a full one; same source
_GEMMA3_27B_LAYERS: Final = 62  # only this size scales queries by hidden size / heads
# Llama 3.1 and 3.2: published rope_scaling; the file only holds the factors computed from it.
_LLAMA3_LOW_FREQ_FACTOR: Final = 1.0
_LLAMA3_HIGH_FREQ_FACTOR: Final = 4.0
_LLAMA3_ORIGINAL_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Where one tensor of the model comes from: its name and shape there, and what to undo on the way."""

    source: str  # name in the GGUF file
    target: str  # name in the safetensors file
    shape: tuple[int, ...]
    permuted_heads: int = 0  # > 0: rows were interleaved per head for llama.cpp's rotary embedding
    subtract_one: bool = False


class _Facts:
    """The metadata of one architecture, with errors that name the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self._prefix = architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelBroken(
                f"{self._file.path}: {self._prefix}.{key} is {_short(value)}, a positive number was expected",
                hint="Fetch the file again, or convert the model again.",
            )
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise ModelBroken(f"{self._file.path}: {self._prefix}.{key} is {value}, a whole number was expected")
        return int(value)


def _short(value: object) -> str:
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def architecture_of(file: GgufFile) -> str:
    """Return the architecture's name in the file.

    Raises:
        ModelNotSupported: not one that kvctl serves, or a mixture of experts.
    """
    name = file.metadata.get("general.architecture")
    if name not in SUPPORTED:
        raise ModelNotSupported(
            f"{file.path} has the architecture {_short(name)}",
            hint=f"These are supported: {', '.join(sorted(SUPPORTED))}.",
        )
    if file.metadata.get(f"{name}.expert_count", 0):
        raise ModelNotSupported(
            f"{file.path} is a mixture of experts ({name}, {file.metadata[f'{name}.expert_count']} experts)",
            hint="Only dense models are supported.",
        )
    return str(name)


def build_config(file: GgufFile) -> dict[str, Any]:
    """Write the model's config.json as a dictionary.

    Raises:
        ModelNotSupported: an architecture or a rope scaling that kvctl does not serve.
        ModelBroken: a value is missing or impossible.
    """
    architecture = architecture_of(file)
    class_name, model_type = SUPPORTED[architecture]
    facts = _Facts(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelBroken(f"{file.path}: tensor token_embd.weight is missing", hint="Fetch the file again.")
    if facts.whole("block_count") > len(file.tensors):
        raise ModelBroken(
            f"{file.path}: {facts.whole('block_count'):,} layers, but only {len(file.tensors):,} tensors",
            hint="Fetch the file again, or convert the model again.",
        )
    num_heads = facts.whole("attention.head_count")
    hidden_size = facts.whole("embedding_length")
    head_dim = facts.whole("attention.key_length", facts.get("rope.dimension_count") or hidden_size // num_heads)
    if facts.get("attention.value_length", head_dim) != head_dim:
        raise ModelNotSupported(f"{file.path}: keys and values of different length", hint="Use another model.")
    num_rotated = facts.whole("rope.dimension_count", head_dim)
    if num_rotated != head_dim:
        raise ModelNotSupported(
            f"{file.path}: rotary embeddings of {num_rotated} of {head_dim} dimensions", hint="Use another model."
        )
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": facts.whole("feed_forward_length"),
        "num_hidden_layers": facts.whole("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts.whole("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.whole("context_length"),
        # The file holds float32; the shortest decimal that gives the same float32 is what was meant (1e-05).
        "rms_norm_eps": _shortest_float32(facts.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest_float32(facts.number("rope.freq_base", 10_000.0)),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,  # Llama: also of the output projection
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    scaling = _rope_scaling(file, facts, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if architecture == "gemma3":
        _add_gemma3(file, config, facts)
    elif architecture == "mistral" or (architecture == "llama" and facts.get("attention.sliding_window")):
        config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
        config["sliding_window"] = facts.get("attention.sliding_window") or None
    if config["model_type"] != "llama":
        del config["mlp_bias"]
    if config["model_type"] in ("qwen2", "mistral"):  # Qwen 2 always has it, Mistral never: no such key there
        del config["attention_bias"]
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[name] = value
    return config


def _shortest_float32(value: float) -> float:
    import numpy as np

    return float(str(np.float32(value)))


def _rope_scaling(file: GgufFile, facts: _Facts, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = facts.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, config)
    if kind in ("none", ""):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest_float32(facts.number("rope.scaling.factor"))}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": _shortest_float32(facts.number("rope.scaling.factor")),
            "original_max_position_embeddings": facts.whole("rope.scaling.original_context_length"),
        }
    raise ModelNotSupported(
        f"{file.path} has the rope scaling {_short(kind)}", hint="These are supported: linear, yarn, llama3."
    )


def llama3_rope_factors(head_dim: int, rope_theta: float, factor: float, original_context: int) -> list[float]:
    """Return by how much Llama 3.1's scaling divides each of the head_dim / 2 rotary frequencies.

    Source: Meta's llama-models repository, llama3/model.py, apply_scaling (2024-07).
    """
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope_theta ** (index / head_dim)
        if wavelength < original_context / _LLAMA3_HIGH_FREQ_FACTOR:
            factors.append(1.0)
        elif wavelength > original_context / _LLAMA3_LOW_FREQ_FACTOR:
            factors.append(factor)
        else:
            smooth = (original_context / wavelength - _LLAMA3_LOW_FREQ_FACTOR) / (
                _LLAMA3_HIGH_FREQ_FACTOR - _LLAMA3_LOW_FREQ_FACTOR
            )
            factors.append(1.0 / ((1.0 - smooth) / factor + smooth))
    return factors


def _llama3_scaling(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Recover the published parameters from the factors in the file, and check that they give these factors."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type_name != "F32":
        raise ModelNotSupported(f"{file.path}: rope_freqs.weight is {tensor.type_name}", hint="F32 is supported.")
    stored = file.rows(tensor).view("<f4").ravel().tolist()
    factor = max(stored)
    if factor == min(stored) == 1.0:
        return None
    expected = llama3_rope_factors(config["head_dim"], config["rope_theta"], factor, _LLAMA3_ORIGINAL_CONTEXT)
    if len(stored) != len(expected) or any(
        not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(stored, expected, strict=True)
    ):
        raise ModelNotSupported(
            f"{file.path}: its rotary frequency factors are not those of Llama 3.1 or 3.2",
            hint="Use the original Hugging Face folder of this model.",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": _LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL_CONTEXT,
    }


def _add_gemma3(file: GgufFile, config: dict[str, Any], facts: _Facts) -> None:
    num_layers = config["num_hidden_layers"]
    pattern = facts.get("attention.sliding_window_pattern", _GEMMA3_LAYERS_PER_FULL)
    if isinstance(pattern, list) and len(pattern) == num_layers:  # one flag for each layer
        kinds = ["sliding_attention" if sliding else "full_attention" for sliding in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)]
    else:
        raise ModelBroken(
            f"{file.path}: attention.sliding_window_pattern is {_short(pattern)} with {num_layers} layers",
            hint="Fetch the file again, or convert the model again.",
        )
    del config["hidden_act"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": kinds,
        "rope_local_base_freq": _shortest_float32(facts.number("rope.freq_base_swa", _GEMMA3_LOCAL_ROPE_THETA)),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if num_layers == _GEMMA3_27B_LAYERS
        else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": facts.get("final_logit_softcapping"),
        "tie_word_embeddings": True,
    }


def plan_tensors(file: GgufFile, config: Mapping[str, Any]) -> list[TensorPlan]:
    """List every weight that the config calls for, in the order in which a forward pass reads them.

    Raises:
        ModelBroken: a tensor is missing or has another shape.
        ModelNotSupported: the file holds a tensor that this architecture does not have.
    """
    plans = _wanted(config)
    for plan in plans:
        tensor = file.tensors.get(plan.source)
        if tensor is None:
            raise ModelBroken(f"{file.path}: tensor {plan.source} is missing", hint="Fetch the file again.")
        if tensor.shape != plan.shape:
            raise ModelBroken(
                f"{file.path}: tensor {plan.source} has shape {list(tensor.shape)}, "
                f"the metadata calls for {list(plan.shape)}",
                hint="Fetch the file again, or convert the model again.",
            )
    unknown = sorted(set(file.tensors) - {plan.source for plan in plans} - {"rope_freqs.weight"})
    if config["model_type"] == "gemma3_text":
        unknown = [name for name in unknown if name != "output.weight"]  # always the embedding once more
    if unknown:
        raise ModelNotSupported(
            f"{file.path}: {config['architectures'][0]} has no tensor {unknown[0]} ({len(unknown)} such tensors)",
            hint="This variant of the architecture is not supported.",
        )
    return plans


def _wanted(config: Mapping[str, Any]) -> list[TensorPlan]:
    model_type = config["model_type"]
    gemma, llama = model_type == "gemma3_text", model_type in ("llama", "mistral")
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    output_bias = config.get("attention_bias", False)
    qkv_bias = output_bias or model_type == "qwen2"
    plans = [TensorPlan("token_embd.weight", "model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for i in range(config["num_hidden_layers"]):
        here, there = f"blk.{i}.", f"model.layers.{i}."

        def add(
            source: str, target: str, *shape: int, heads: int = 0, norm: bool = False, here: str = here,
            there: str = there,
        ) -> None:  # fmt: skip
            plans.append(TensorPlan(here + source, there + target, shape, heads if llama else 0, norm and gemma))

        add("attn_norm.weight", "input_layernorm.weight", hidden, norm=True)
        for name, size, heads in (("q", q_size, num_heads), ("k", kv_size, num_kv_heads), ("v", kv_size, 0)):
            add(f"attn_{name}.weight", f"self_attn.{name}_proj.weight", size, hidden, heads=heads)
            if qkv_bias:
                add(f"attn_{name}.bias", f"self_attn.{name}_proj.bias", size, heads=heads)
        if gemma or model_type == "qwen3":
            add("attn_q_norm.weight", "self_attn.q_norm.weight", head_dim, norm=True)
            add("attn_k_norm.weight", "self_attn.k_norm.weight", head_dim, norm=True)
        add("attn_output.weight", "self_attn.o_proj.weight", hidden, q_size)
        if output_bias:
            add("attn_output.bias", "self_attn.o_proj.bias", hidden)
        if gemma:
            add("post_attention_norm.weight", "post_attention_layernorm.weight", hidden, norm=True)
            add("ffn_norm.weight", "pre_feedforward_layernorm.weight", hidden, norm=True)
        else:
            add("ffn_norm.weight", "post_attention_layernorm.weight", hidden, norm=True)
        add("ffn_gate.weight", "mlp.gate_proj.weight", inner, hidden)
        add("ffn_up.weight", "mlp.up_proj.weight", inner, hidden)
        add("ffn_down.weight", "mlp.down_proj.weight", hidden, inner)
        if gemma:
            add("post_ffw_norm.weight", "post_feedforward_layernorm.weight", hidden, norm=True)
    plans.append(TensorPlan("output_norm.weight", "model.norm.weight", (hidden,), subtract_one=gemma))
    if not config["tie_word_embeddings"]:
        plans.append(TensorPlan("output.weight", "lm_head.weight", (config["vocab_size"], hidden)))
    return plans
