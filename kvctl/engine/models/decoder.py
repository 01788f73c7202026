"""The decoder-only transformer: one implementation for every family, driven by its DecoderConfig.

Knows no checkpoint format (`weights` hands it tensors by key), no request and no device. A step is one pass per
layer over the tokens of all requests, laid end to end. Floor 2.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvctl.engine.kv_cache import LayerKV
from kvctl.engine.layers.embedding import Embedding
from kvctl.engine.layers.linear import Linear, LinearBackend
from kvctl.engine.layers.norm import RMSNorm
from kvctl.engine.layers.rotary import build_cos_sin_cache
from kvctl.engine.models.decoder_config import DecoderConfig, RopeConfig
from kvctl.engine.models.layer_stack import LayerStack, LayerWeights, select_layer_stack
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


class Decoder:
    """Token ids and caches in, hidden states out; `logits` turns chosen rows of those into scores."""

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Embedding,
        layers: LayerStack,
        final_norm: RMSNorm,
        lm_head: Linear,
    ) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_layers: Sequence[LayerKV],
        metadata: Sequence[AttentionMetadata],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over int64 [num_tokens]; `metadata` has one entry per KV cache group.

        Returns (added, residual), each [num_tokens, hidden_size]: their sum is the hidden state before the last
        norm. `logits` takes rows of both, so that the norm and the output matrix run only where they are needed.
        Where only some are needed, and each is the last token of its request, `rows` (int64 [S], rising) says so:
        both are then [S, hidden_size].
        """
        return self._layers(self._embedding(token_ids), positions, kv_layers, metadata, rows)

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
    rope_tables: dict[RopeConfig, Tensor] = {}

    def linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
        packed = Linear(weight, bias, linears)
        packed.prepack()
        return packed

    def rope_table(rope: RopeConfig) -> Tensor:
        if rope not in rope_tables:
            rope_tables[rope] = build_cos_sin_cache(rope, config.head_dim, num_positions, device)
        return rope_tables[rope]

    def layer(index: int) -> LayerWeights:
        names = layer_tensors(config, index)

        def load(name: str) -> Tensor:
            return weights.load(names[name])

        def load_linear(name: str) -> Linear:
            bias = f"{name}_bias"
            return linear(load(name), load(bias) if bias in names else None)

        def optional(name: str) -> Tensor | None:
            return load(name) if name in names else None

        return LayerWeights(
            qkv=load_linear("qkv"),
            output=load_linear("output"),
            q_norm=optional("q_norm"),
            k_norm=optional("k_norm"),
            input_norm=load("input_norm"),
            attention_out_norm=optional("attention_out_norm"),
            mlp_norm=load("mlp_norm"),
            gate_up=load_linear("gate_up"),
            down=load_linear("down"),
            mlp_out_norm=optional("mlp_out_norm"),
            cos_sin_cache=rope_table(config.ropes[index]),
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
        select_layer_stack(config, [layer(index) for index in range(config.num_layers)], ops),
        RMSNorm(weights.load(final_norm_tensor(config)), config.rms_norm_eps, ops),
        lm_head,
    )
