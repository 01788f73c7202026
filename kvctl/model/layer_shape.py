"""What one layer keeps per token or per request: the vocabulary shared by shapes, specs and reports.

Knows no config and no engine: plain numbers. Floor 0.
"""

from dataclasses import dataclass
from enum import StrEnum


class LayerKind(StrEnum):
    """How the memory of a layer grows."""

    FULL = "full"  # every token
    SLIDING = "sliding"  # the last `window_tokens`
    CHUNKED = "chunked"  # the current chunk of `window_tokens`
    MLA = "mla"  # every token, one latent for all heads
    CROSS = "cross"  # the encoder's tokens, once per request
    STATE = "state"  # fixed bytes per request: Mamba, GDN, KDA, lightning, short convolution
    COMPRESSED = "compressed"  # one entry per `compress_ratio` tokens, beside a window
    SHARED = "shared"  # reads another layer's cache
    NONE = "none"  # an MLP or MoE layer of its own


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a recurrent state: how many elements per request, in which format.

    Tensor parallelism divides `num_elements`. Beside them a Mamba-2 convolution keeps `group_elements` for each
    of `num_groups` groups, and every rank needs at least one whole group. `dtype` None: the model's own.
    """

    name: str
    num_elements: int
    dtype: str | None = None
    group_elements: int = 0
    num_groups: int = 0

    def elements_per_rank(self, tensor_parallel: int) -> int:
        """Elements on one rank, rounded up."""
        groups = max(1, self.num_groups // tensor_parallel) if self.num_groups else 0
        return -(-self.num_elements // tensor_parallel) + groups * self.group_elements


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One cache-bearing part of one layer (a layer with attention AND a Mamba block has two)."""

    index: int
    kind: LayerKind
    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window_tokens: int | None = None
    indexer_bytes: int = 0  # per token, beside the main cache: DSA's lightning indexer
    source_tokens: int | None = None  # cross attention: encoder tokens per request
    state: tuple[StatePart, ...] | None = None  # STATE only; None: its size is not known
    compress_ratio: int = 0
    label: str = ""  # what the model calls it: 'gdn', 'mamba2', 'kda', 'dsa', 'dsa shared' (an earlier layer's index)

    @property
    def is_sparse(self) -> bool:
        """Whether attention reads chosen tokens only (DSA)."""
        return self.label.startswith("dsa")

    @property
    def name(self) -> str:
        """The kind, with the model's own word where it says more."""
        return self.label or self.kind.value
