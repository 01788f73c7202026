"""What a GGUF file says about its model: config facts and exact weight bytes, from its header alone.

Knows the GGUF format and how its keys map to config.json fields; never reads a weight. Lengths in the file are
untrusted: each is checked against what is left of the file. Floor 0.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from kvctl.errors import ModelBroken, ModelNotSupported
from kvctl.model.dtypes import ggml_bytes

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_KEPT_ARRAY = 4096  # longer arrays (vocabularies) are counted, not kept
_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "falcon": "falcon",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "deepseek2": "deepseek_v2",
    "granite": "granite",
    "glm4": "glm4",
    "gpt-oss": "gpt_oss",
    "mistral3": "mistral",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "exaone4": "exaone4",
    "command-r": "cohere",
    "cohere2": "cohere2",
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "rope.dimension_count": "_rope_dim",
    "vocab_size": "vocab_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
}


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """A config.json made of the header, and the bytes and parameters of all tensors."""

    config: dict[str, Any]
    weight_bytes: int
    num_parameters: int


class _Reader:
    """Reads numbers and strings, never past the end."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file, self._left, self._where = file, size, where

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise ModelBroken(f"{self._where} ends inside its GGUF header", hint="Download it again.")
        self._left -= count
        return self._file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth > 4:
            raise ModelBroken(f"{self._where} holds a value of unknown GGUF type {kind}", hint="Is it a GGUF file?")
        inner, count = self.number("<I"), self.number("<Q")
        if count > self._left:
            raise ModelBroken(f"{self._where} claims an array of {count:,} items", hint="Download it again.")
        kept = []
        for i in range(count):
            item = self.value(inner, depth + 1)
            if i < _KEPT_ARRAY:
                kept.append(item)
        return kept if count <= _KEPT_ARRAY else count


def read_gguf(path: Path) -> GgufFacts:
    """Read the header of a GGUF file.

    Raises:
        ModelBroken: not a GGUF file, or a damaged one.
        ModelNotSupported: an architecture or a tensor type that is not known here.
    """
    with path.open("rb") as file:
        reader = _Reader(file, path.stat().st_size, path.name)
        if reader.take(4) != b"GGUF":
            raise ModelBroken(f"{path.name} does not begin like a GGUF file", hint="Give a .gguf file.")
        version = reader.number("<I")
        if version not in (2, 3):
            raise ModelNotSupported(f"cannot tell: GGUF version {version}", hint="Versions 2 and 3 are known.")
        num_tensors, num_keys = reader.number("<Q"), reader.number("<Q")
        if num_tensors > 10**6 or num_keys > 10**6:
            raise ModelBroken(
                f"{path.name} claims {num_tensors:,} tensors and {num_keys:,} keys", hint="Download it again."
            )
        keys = {}
        for _ in range(num_keys):
            name = reader.string()
            keys[name] = reader.value(reader.number("<I"))
        total_bytes = total_elements = 0
        names = set()
        for _ in range(num_tensors):
            names.add(reader.string())
            dims = [reader.number("<Q") for _ in range(min(reader.number("<I"), 8))]
            kind = _TYPES.get(reader.number("<I"))
            reader.number("<Q")
            elements = prod(dims)
            n_bytes = ggml_bytes(kind, elements) if kind else None
            if n_bytes is None:
                raise ModelNotSupported(f"cannot tell: {path.name} has a tensor of unknown type", hint="Update kvctl.")
            total_bytes += n_bytes
            total_elements += elements
    return GgufFacts(_config(keys, names, path.name), total_bytes, total_elements)


def _config(keys: dict[str, Any], tensors: set[str], where: str) -> dict[str, Any]:
    arch = keys.get("general.architecture")
    family = _FAMILIES.get(arch) if isinstance(arch, str) else None
    if family is None:
        raise ModelNotSupported(f"cannot tell: GGUF architecture {arch!r} is not known here", hint="Give config.json.")
    config: dict[str, Any] = {"model_type": family, "torch_dtype": "float16"}
    for key, field in _FIELDS.items():
        value = keys.get(f"{arch}.{key}")
        if isinstance(value, list) and value:  # per layer: kept as a list where it varies
            if len(set(value)) > 1 and field == "num_key_value_heads":
                config["num_key_value_heads_per_layer"] = value
            value = max(value)
        if value is not None:
            config[field] = value
    vocabulary = keys.get("tokenizer.ggml.tokens")
    if "vocab_size" not in config and vocabulary is not None:
        config["vocab_size"] = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    if "kv_lora_rank" in config:
        config["qk_rope_head_dim"] = config.get("_rope_dim", 64)
        config.pop("head_dim", None)
        config.pop("num_key_value_heads", None)
    config.pop("_rope_dim", None)
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if config.get("num_local_experts") and family == "llama":
        config["model_type"] = "mixtral"
    if not config.get("num_hidden_layers"):
        raise ModelBroken(f"{where} does not say how many layers it has", hint="Download it again.")
    return config
