"""The layers of a decoder as one thing to call: operation by operation, or all of them in one native call.

Knows no checkpoint, no request and no kernel's inside. `select_layer_stack` decides once, from what the layers were
packed for; both give the same bits where both can run. Floor 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kvctl.engine.kv_cache import LayerKV
from kvctl.engine.layers.attention import Attention
from kvctl.engine.layers.linear import Linear
from kvctl.engine.layers.mlp import GatedMLP
from kvctl.engine.layers.norm import RMSNorm
from kvctl.engine.models.decoder_config import DecoderConfig
from kvctl.engine.ops import AttentionMetadata, Ops
from kvctl_kernels.cpu_linear import NativeLinear
from kvctl_kernels.cpu_ops import NativeCpuOps
from kvctl_kernels.cpu_stack import NativeStack, StackLayer, StackShape


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What was loaded for one layer; norms that the model lacks are None."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    mlp_out_norm: Tensor | None
    cos_sin_cache: Tensor


class LayerStack(Protocol):
    """All layers of a model."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv_layers: Sequence[LayerKV],
        metadata: Sequence[AttentionMetadata],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Embeddings x [num_tokens, hidden_size]; returns (what the last MLP adds, the residual stream before it).

        `metadata` has one entry per KV cache group. `rows`, int64 [S] rising: only these tokens' results are wanted;
        each is the last one of its request in this step.
        """


class DecoderLayer:
    """Norm, attention, norm, MLP; what they add is normed too where the model has sandwich norms."""

    __slots__ = ("_attention", "_attention_out_norm", "_input_norm", "_mlp", "_mlp_norm", "_mlp_out_norm")

    def __init__(self, config: DecoderConfig, index: int, weights: LayerWeights, ops: Ops) -> None:
        def norm(weight: Tensor) -> RMSNorm:
            return RMSNorm(weight, config.rms_norm_eps, ops)

        def optional_norm(weight: Tensor | None) -> RMSNorm | None:
            return None if weight is None else norm(weight)

        self._input_norm = norm(weights.input_norm)
        self._attention = Attention(
            weights.qkv,
            weights.output,
            ops,
            weights.cos_sin_cache,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.windows[index],
            soft_cap=config.attention_soft_cap,
            q_norm=optional_norm(weights.q_norm),
            k_norm=optional_norm(weights.k_norm),
        )
        self._attention_out_norm = optional_norm(weights.attention_out_norm)
        self._mlp_norm = norm(weights.mlp_norm)
        activate = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
        self._mlp = GatedMLP(weights.gate_up, weights.down, activate)
        self._mlp_out_norm = optional_norm(weights.mlp_out_norm)

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


class PerOperationStack:
    """Layer after layer, one call per operation: any device, any kernels."""

    def __init__(self, config: DecoderConfig, weights: Sequence[LayerWeights], ops: Ops) -> None:
        self._layers = tuple(DecoderLayer(config, index, layer, ops) for index, layer in enumerate(weights))

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv_layers: Sequence[LayerKV],
        metadata: Sequence[AttentionMetadata],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `LayerStack`."""
        residual: Tensor | None = None
        for layer, kv in zip(self._layers, kv_layers, strict=True):
            x, residual = layer(x, residual, positions, kv, metadata[kv.group])
        assert residual is not None  # a config has at least one layer
        return (x, residual) if rows is None else (x.index_select(0, rows), residual.index_select(0, rows))


class NativeLayerStack:
    """One call into the compiled CPU kernels; caches that these cannot read are left to `otherwise`.

    The addresses of the caches are taken at the first step over them.
    """

    def __init__(
        self,
        shape: StackShape,
        layers: Sequence[StackLayer],
        ops: NativeCpuOps,
        otherwise: PerOperationStack,
    ) -> None:
        self._shape = shape
        self._layers = layers
        self._ops = ops
        self._otherwise = otherwise
        self._kv_layers: Sequence[LayerKV] | None = None
        self._native: NativeStack | None = None

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        kv_layers: Sequence[LayerKV],
        metadata: Sequence[AttentionMetadata],
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `LayerStack`."""
        if kv_layers is not self._kv_layers:
            self._attach(kv_layers)
        if self._native is None:
            return self._otherwise(x, positions, kv_layers, metadata, rows)
        return self._native(x, positions, metadata, rows)

    def _attach(self, kv_layers: Sequence[LayerKV]) -> None:
        self._kv_layers = kv_layers
        self._native = None
        if all(kv.k_cache.dtype is self._ops.dtype for kv in kv_layers):
            caches = [(kv.k_cache, kv.v_cache, kv.group) for kv in kv_layers]
            self._native = NativeStack(self._ops, self._shape, self._layers, caches)


def select_layer_stack(config: DecoderConfig, weights: Sequence[LayerWeights], ops: Ops) -> LayerStack:
    """One native call for all layers where operations and matrix products are native ones, else one per operation."""
    one_by_one = PerOperationStack(config, weights, ops)
    if not isinstance(ops, NativeCpuOps):
        return one_by_one
    layers: list[StackLayer] = []
    for layer, window in zip(weights, config.windows, strict=True):
        linears = (layer.qkv.packed, layer.output.packed, layer.gate_up.packed, layer.down.packed)
        natives = [linear for linear in linears if isinstance(linear, NativeLinear)]
        if len(natives) < len(linears):
            return one_by_one
        qkv, output, gate_up, down = natives
        layers.append(
            StackLayer(
                input_norm=layer.input_norm,
                qkv=qkv,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                output=output,
                attention_out_norm=layer.attention_out_norm,
                mlp_norm=layer.mlp_norm,
                gate_up=gate_up,
                down=down,
                mlp_out_norm=layer.mlp_out_norm,
                cos_sin_cache=layer.cos_sin_cache,
                window=window,
            )
        )
    shape = StackShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        is_gelu=config.activation == "gelu_tanh",
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        attention_soft_cap=config.attention_soft_cap,
    )
    if not NativeStack.supports(shape, layers, ops.dtype):
        return one_by_one
    return NativeLayerStack(shape, layers, ops, one_by_one)
