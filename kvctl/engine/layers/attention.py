"""One attention layer: fused projection, optional head norms, rotation, cache, attention, output projection.

Knows no model: sizes and switches come in as arguments. It writes this step's keys and values to the cache BEFORE
it attends, so that one rule (causal over the cache) serves prompts, chunks and single tokens. Floor 2.
"""

from functools import partial

from torch import Tensor

from kvctl.engine.kv_cache import LayerKV
from kvctl.engine.layers.linear import Linear
from kvctl.engine.layers.norm import RMSNorm
from kvctl.engine.ops import AttentionMetadata, Ops


class Attention:
    """`q_norm` and `k_norm` together or not at all; `window` as in DecoderConfig."""

    __slots__ = (
        "_cos_sin_cache",
        "_head_dim",
        "_num_heads",
        "_num_kv_heads",
        "_ops",
        "_output",
        "_place",
        "_qkv",
        "_scale",
        "_soft_cap",
        "_window",
    )

    def __init__(
        self,
        qkv: Linear,
        output: Linear,
        ops: Ops,
        cos_sin_cache: Tensor,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        self._qkv = qkv
        self._output = output
        self._ops = ops
        self._cos_sin_cache = cos_sin_cache
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._scale = scale
        self._window = window
        self._soft_cap = soft_cap
        if q_norm is None or k_norm is None:
            self._place = ops.rotary_and_store_kv
        else:
            self._place = partial(ops.norm_rotary_and_store_kv, q_norm.weight, k_norm.weight, q_norm.eps)

    def __call__(self, x: Tensor, positions: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """x [num_tokens, hidden_size], positions int64 [num_tokens]; returns like x."""
        num_tokens = x.shape[0]
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        heads = self._qkv(x).view(num_tokens, num_heads + 2 * num_kv_heads, self._head_dim)
        query, key, value = heads.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
        query = self._place(
            query, key, value, positions, self._cos_sin_cache, kv.k_cache, kv.v_cache, meta.slot_mapping, kv.scales
        )
        attended = self._ops.paged_attention(
            query,
            kv.k_cache,
            kv.v_cache,
            meta,
            scale=self._scale,
            window=self._window,
            soft_cap=self._soft_cap,
            scales=kv.scales,
        )
        return self._output(attended.view(num_tokens, num_heads * self._head_dim))
