"""The decoder-only transformer: one implementation for every family, driven by its DecoderConfig.

Knows no checkpoint format (`weights` hands it tensors by key), no request and no device. A step is one pass per
layer over the tokens of all requests, laid end to end. Floor 2.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvctl.engine.kv_cache import LayerKV
from kvctl.engine.layers.attention import Attention
from kvctl.engine.layers.embedding import Embedding
from kvctl.engine.layers.linear import Linear, LinearBackend
from kvctl.engine.layers.mlp import GatedMLP
from kvctl.engine.layers.norm import RMSNorm
from kvctl.engine.layers.rotary import build_cos_sin_cache
from kvctl.engine.models.decoder_config import DecoderConfig, RopeConfig
from kvctl.engine.models.weight_layout import (
    PackedTensor,
    embedding_tensor,
    final_norm_tensor,
    layer_tensors,
    lm_head_tensor,
)
from kvctl.engine.ops import AttentionMetadata, Ops


class WeightSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def load(self, packed: PackedTensor) -> Tensor:
        """Return the packed tensor in the model's dtype on its device; each is asked for once, in layout order."""

    def find(self, name: str) -> Tensor | None:
        """Return a tensor that need not be there, as stored."""


class DecoderLayer:
    """Norm, attention, norm, MLP; what they add is normed too where the model has sandwich norms."""

    __slots__ = ("_attention", "_attention_out_norm", "_input_norm", "_mlp", "_mlp_norm", "_mlp_out_norm")

    def __init__(
        self,
        input_norm: RMSNorm,
        attention: Attention,
        attention_out_norm: RMSNorm | None,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        mlp_out_norm: RMSNorm | None,
    ) -> None:
        self._input_norm = input_norm
        self._attention = attention
        self._attention_out_norm = attention_out_norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv: LayerKV, meta: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """Return (what this layer's MLP adds, the residual stream before it); None: the first layer."""
        if residual is None:
            normed, residual = self._input_norm(x), x
        else:
            normed, residual = self._input_norm.add(x, residual)
        added = self._attention(normed, positions, kv, meta)
        if self._attention_out_norm is not None:
            added = self._attention_out_norm(added)
        normed, residual = self._mlp_norm.add(added, residual)
        added = self._mlp(normed)
        if self._mlp_out_norm is not None:
            added = self._mlp_out_norm(added)
        return added, residual


class Decoder:
    """Token ids and caches in, hidden states out; `logits` turns chosen rows of those into scores."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        final_norm: RMSNorm,
        lm_head: Linear,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._lm_head = lm_head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_layers: Sequence[LayerKV],
        metadata: Sequence[AttentionMetadata],
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over int64 [num_tokens]; `metadata` has one entry per KV cache group.

        Returns (added, residual), each [num_tokens, hidden_size]: their sum is the hidden state before the last
        norm. `logits` takes rows of both, so that the norm and the output matrix run only where they are needed.
        """
        x = self._embedding(token_ids)
        residual: Tensor | None = None
        for layer, kv in zip(self._layers, kv_layers, strict=True):
            x, residual = layer(x, residual, positions, kv, metadata[kv.group])
        assert residual is not None  # a config has at least one layer
        return x, residual

    def logits(self, added: Tensor, residual: Tensor) -> Tensor:
        """Scores of the next token, [num_rows, vocab_size] in the model's dtype, for rows of `forward`'s result."""
        normed, _ = self._final_norm.add(added, residual)
        scores = self._lm_head(normed)
        cap = self.config.logit_soft_cap
        return scores if cap is None else torch.tanh(scores / cap) * cap


def build_decoder(
    config: DecoderConfig,
    weights: WeightSource,
    ops: Ops,
    linears: LinearBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
) -> Decoder:
    """Load and pack layer by layer, so that at most one tensor exists in two layouts at a time.

    `num_positions`: rows of the rotary tables, the longest sequence that will be served.
    """
    activate = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
    rope_tables: dict[RopeConfig, Tensor] = {}

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = Linear(weight, bias, linears)
        packed.prepack()
        return packed

    def norm(tensor: Tensor) -> RMSNorm:
        return RMSNorm(tensor, config.rms_norm_eps, ops)

    def rope_table(rope: RopeConfig) -> Tensor:
        if rope not in rope_tables:
            rope_tables[rope] = build_cos_sin_cache(rope, config.head_dim, num_positions, device)
        return rope_tables[rope]

    def layer(index: int) -> DecoderLayer:
        names = layer_tensors(config, index)

        def load(name: str) -> Tensor:
            return weights.load(names[name])

        def load_linear(name: str) -> Linear:
            bias = f"{name}_bias"
            return linear(load(name), load(bias) if bias in names else None)

        def optional_norm(name: str) -> RMSNorm | None:
            return norm(load(name)) if name in names else None

        attention = Attention(
            load_linear("qkv"),
            load_linear("output"),
            ops,
            rope_table(config.ropes[index]),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.windows[index],
            soft_cap=config.attention_soft_cap,
            q_norm=optional_norm("q_norm"),
            k_norm=optional_norm("k_norm"),
        )
        return DecoderLayer(
            norm(load("input_norm")),
            attention,
            optional_norm("attention_out_norm"),
            norm(load("mlp_norm")),
            GatedMLP(load_linear("gate_up"), load_linear("down"), activate),
            optional_norm("mlp_out_norm"),
        )

    table = weights.load(embedding_tensor(config))
    head = lm_head_tensor(config)
    if head is None:
        lm_head = linear(table)
        lookup = lm_head.rows
    else:
        lm_head = linear(weights.load(head))
        lookup = Linear(table).rows  # never multiplied with: stays as it is
    del table
    return Decoder(
        config,
        Embedding(lookup, config.embedding_scale, dtype),
        [layer(index) for index in range(config.num_layers)],
        norm(weights.load(final_norm_tensor(config))),
        lm_head,
    )
