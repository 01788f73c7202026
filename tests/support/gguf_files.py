"""Write small GGUF files the way llama.cpp's converter does: from a transformers model, or from plain metadata."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = _NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}


def _gguf_name(name: str, gemma: bool) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{(_GEMMA_NAMES if gemma else _NAMES)[module]}.{kind}"


def _permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the halves of each head's rows, for llama.cpp's rotary embedding."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def byte_level_vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer: some control tokens, the 256 bytes, then fillers up to `size`."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet())][:size]
    types = [3] * 3 + [1] * (len(tokens) - 3)
    fill = size - len(tokens)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(fill)],
        "tokenizer.ggml.token_type": types + [5] * fill,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    quant_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> None:
    """Write a file; matrices are quantised, vectors stay float32."""
    writer = gguf.GGUFWriter(str(path), metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value:  # the writer has no empty arrays
            writer.add_array(key, value)
    for name, values in tensors.items():
        if values.ndim > 1 and quant_type is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, quant_type), raw_dtype=quant_type)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_metadata(config: Any) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a transformers config."""
    arch = _ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if arch == "gemma3":
        metadata["gemma3.attention.sliding_window"] = config.sliding_window
    elif getattr(config, "sliding_window", None):
        metadata[f"{arch}.attention.sliding_window"] = config.sliding_window
    if rope.get("rope_type") == "linear":
        metadata |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(rope["factor"])}
    return metadata | byte_level_vocabulary(config.vocab_size)


def model_tensors(model: Any) -> dict[str, np.ndarray]:
    """The weights of a transformers model under llama.cpp's names and in its order."""
    config = model.config
    gemma, llama = config.model_type == "gemma3_text", config.model_type in ("llama", "mistral")
    tensors = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = value.float().numpy()
        if llama and ".q_proj." in name:
            values = _permuted(values, config.num_attention_heads)
        elif llama and ".k_proj." in name:
            values = _permuted(values, config.num_key_value_heads)
        elif gemma and name.endswith("norm.weight"):
            values = values + 1
        tensors[_gguf_name(name, gemma)] = values
    return tensors
