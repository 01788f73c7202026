"""Names of number formats -> bits, for weights, activations and KV caches.

Knows no model and no engine. Sizes are bits per element, so that 4-bit formats stay exact; block formats
carry their scales in the figure. Floor 0.
"""

from dataclasses import dataclass
from fractions import Fraction

from kvctl.errors import ConfigError

_ELEMENT_BITS: dict[str, int] = {
    "float32": 32,
    "float": 32,
    "fp32": 32,
    "f32": 32,
    "bfloat16": 16,
    "bf16": 16,
    "float16": 16,
    "half": 16,
    "fp16": 16,
    "f16": 16,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "fp8": 8,
    "int8": 8,
    "uint8": 8,
}
_SAFETENSORS_BITS: dict[str, int] = {
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "F32": 32,
    "I32": 32,
    "U32": 32,
    "F16": 16,
    "BF16": 16,
    "I16": 16,
    "U16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I8": 8,
    "U8": 8,
    "BOOL": 8,
    "F4": 4,
}
# ggml block formats: (elements per block, bytes per block). Source: ggml-common.h of llama.cpp, block_* structs.
_GGML_BLOCKS: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "I8": (1, 1),
    "I16": (1, 2),
    "I32": (1, 4),
    "I64": (1, 8),
    "F64": (1, 8),
}


def element_bits(name: str) -> int:
    """Bits of one element of a plain format ('bfloat16', 'torch.float16', 'fp8').

    Raises:
        ConfigError: not a format known here.
    """
    bits = _ELEMENT_BITS.get(name.removeprefix("torch.").lower())
    if bits is None:
        raise ConfigError(f"{name!r} is not a number format known here", hint="Choose bfloat16, float16 or float32.")
    return bits


def element_bytes(name: str) -> int:
    """Bytes of one element of a plain format of whole bytes; see `element_bits`."""
    return element_bits(name) // 8


def safetensors_bits(name: str) -> int | None:
    """Bits of one element of a safetensors dtype ('BF16'); None when the name is unknown."""
    return _SAFETENSORS_BITS.get(name)


def ggml_bytes(name: str, num_elements: int) -> int | None:
    """Bytes of `num_elements` elements in a ggml format ('Q4_K'); None when the name is unknown."""
    block = _GGML_BLOCKS.get(name)
    return None if block is None else -(-num_elements // block[0]) * block[1]


def ggml_bits(name: str) -> Fraction | None:
    """Bits per element of a ggml format with its scales ('Q4_K' -> 4.5); None when the name is unknown."""
    block = _GGML_BLOCKS.get(name)
    return None if block is None else Fraction(block[1] * 8, block[0])


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values are stored.

    `bits` per element; `scale_group` > 0 adds one byte of scale per that many elements of a head (NVFP4);
    `scale_bytes_per_vector` adds bytes per head, token and side (per-token-head scales).
    """

    name: str
    bits: int
    scale_group: int = 0
    scale_bytes_per_vector: int = 0

    def vector_bytes(self, num_elements: int) -> int:
        """Bytes of one key or value vector of one head and token, its scales included."""
        data = -(-num_elements * self.bits // 8)
        scales = -(-num_elements // self.scale_group) if self.scale_group else 0
        return data + scales + self.scale_bytes_per_vector


# Source: vLLM's --kv-cache-dtype (v1/kv_cache_interface.py, 2026): fp8 has one scale per layer, outside the pool;
# nvfp4 packs one FP8 scale per 16 elements beside the data; int8 is its per-token-head format with a float32
# scale per head and side.
_KV_FORMATS: dict[str, KVFormat] = {
    "fp8": KVFormat("fp8", 8),
    "fp8_e4m3": KVFormat("fp8_e4m3", 8),
    "fp8_e5m2": KVFormat("fp8_e5m2", 8),
    "int8": KVFormat("int8", 8, scale_bytes_per_vector=4),
    "nvfp4": KVFormat("nvfp4", 4, scale_group=16),
}
KV_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32", *_KV_FORMATS)


def kv_format(name: str, model_dtype: str) -> KVFormat:
    """The KV format that an engine option names; 'auto' is the model's own dtype.

    Raises:
        ConfigError: not a KV format known here.
    """
    lowered = name.lower()
    if lowered == "auto":
        return KVFormat(model_dtype, element_bits(model_dtype))
    if lowered in _KV_FORMATS:
        return _KV_FORMATS[lowered]
    if lowered in _ELEMENT_BITS and _ELEMENT_BITS[lowered] >= 16:
        return KVFormat(lowered, _ELEMENT_BITS[lowered])
    raise ConfigError(
        f"--kv-cache-dtype is {name!r}", hint="Choose auto, bf16, fp8, fp8_e4m3, fp8_e5m2, int8 or nvfp4."
    )
