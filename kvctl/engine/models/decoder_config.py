"""What one decoder-only transformer looks like: every number and switch that the one implementation reads.

Knows no torch, no file and no family: `families.py` fills it from a config.json, `decoder.py` builds from it.
Invariants: one `window` and one `rope` per layer; `num_heads` is a multiple of `num_kv_heads`. Floor 2.
"""

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of some layers; fields beside `theta` matter only to the types that read them."""

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    original_max_position_tokens: int = 0  # llama3, yarn, dynamic: the length the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn; None: from `factor` and the two mscales
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """One model. Biases are per fused projection: q, k and v share `qkv_bias`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_tokens: int  # the longest sequence, with what a rope scaling stretches it to
    rms_norm_eps: float
    windows: tuple[int | None, ...]  # per layer, in tokens incl. the token itself; None: full attention
    ropes: tuple[RopeConfig, ...]  # per layer
    attention_scale: float
    activation: Activation = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before rotation
    sandwich_norms: bool = False  # also norm what attention and MLP add to the residual
    norm_plus_one: bool = False  # stored norm weights are w of (1 + w)
    embedding_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    name_prefix: str = "model."  # of tensor names in the checkpoint
    allows_float16: bool = True  # False: activations leave float16's range

    @property
    def query_size(self) -> int:
        """Outputs of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
