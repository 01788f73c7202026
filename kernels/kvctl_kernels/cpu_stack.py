"""All layers of a decoder by one call into the compiled CPU kernels.

Knows tensors and the C interface of `cpu_stack.h`; no checkpoint and no scheduler. Float32 and bfloat16, head sizes
that are multiples of 16. The result is bit for bit that of the single operations in the same order.
"""

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kvctl_kernels.cpu_linear import NativeLinear
from kvctl_kernels.cpu_ops import DTYPE_CODES, HEAD_DIM_MULTIPLE, NativeCpuOps
from kvctl_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StackLayer:
    """What one layer is made of; norms that a model lacks are None, `window` None is full attention."""

    input_norm: Tensor
    qkv: NativeLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: NativeLinear
    attention_out_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: NativeLinear
    down: NativeLinear
    mlp_out_norm: Tensor | None
    cos_sin_cache: Tensor
    window: int | None

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """All of them."""
        return (
            self.input_norm,
            self.q_norm,
            self.k_norm,
            self.attention_out_norm,
            self.mlp_norm,
            self.mlp_out_norm,
        )


@dataclass(frozen=True, slots=True)
class StackShape:
    """The numbers all layers share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_gelu: bool
    eps: float
    attention_scale: float
    attention_soft_cap: float | None


class _Linear(ctypes.Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p))


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_out_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_out_norm", c_void_p),
        ("qkv", _Linear),
        ("output", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("cos_sin", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("window", c_int32),
        ("group", c_int32),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("num_layers", c_int32),
        ("num_groups", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rot_dim", c_int32),
        ("block_size", c_int32),
        ("is_gelu", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class _Group(ctypes.Structure):
    _fields_ = (("block_tables", c_void_p), ("slots", c_void_p), ("table_stride", c_int64))


class _Step(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("added", c_void_p),
        ("residual", c_void_p),
        ("rows", c_void_p),
        ("num_rows", c_int64),
        ("positions", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("groups", ctypes.POINTER(_Group)),
        ("num_tokens", c_int64),
        ("num_requests", c_int32),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(linear: NativeLinear) -> _Linear:
    return _Linear(*linear.addresses)


class NativeStack:
    """Layers over their caches. `caches`: per layer (k_cache, v_cache, index of its KV cache group).

    Invariant: all layers of a group have the same window.
    """

    @staticmethod
    def supports(shape: StackShape, layers: Sequence[StackLayer], dtype: torch.dtype) -> bool:
        """Whether the kernels can run these layers: norm weights in float32, one length of rotation."""
        rotated = {layer.cos_sin_cache.shape[1] for layer in layers}
        norms = {norm.dtype for layer in layers for norm in layer.norms if norm is not None}
        return shape.head_dim % HEAD_DIM_MULTIPLE == 0 and len(rotated) == 1 and norms == {torch.float32}

    def __init__(
        self,
        ops: NativeCpuOps,
        shape: StackShape,
        layers: Sequence[StackLayer],
        caches: Sequence[tuple[Tensor, Tensor, int]],
    ) -> None:
        library = ops.library
        library.kvctl_stack.argtypes = [c_int, c_void_p, c_void_p, c_int]
        library.kvctl_stack.restype = None
        self._run = library.kvctl_stack
        self._code = DTYPE_CODES[ops.dtype]
        self._dtype = ops.dtype
        self._threads = ops.num_threads
        self._hidden_size = shape.hidden_size
        self._kept = (tuple(layers), tuple(caches))  # whose addresses stand in the structures
        self._layers = (_Layer * len(layers))(
            *(
                _Layer(
                    input_norm=_address(layer.input_norm),
                    q_norm=_address(layer.q_norm),
                    k_norm=_address(layer.k_norm),
                    attention_out_norm=_address(layer.attention_out_norm),
                    mlp_norm=_address(layer.mlp_norm),
                    mlp_out_norm=_address(layer.mlp_out_norm),
                    qkv=_linear(layer.qkv),
                    output=_linear(layer.output),
                    gate_up=_linear(layer.gate_up),
                    down=_linear(layer.down),
                    cos_sin=_address(layer.cos_sin_cache),
                    k_cache=_address(k_cache),
                    v_cache=_address(v_cache),
                    window=layer.window or 0,
                    group=group,
                )
                for layer, (k_cache, v_cache, group) in zip(layers, caches, strict=True)
            )
        )
        num_groups = 1 + max(group for _, _, group in caches)
        self._groups = (_Group * num_groups)()
        self._model = _Model(
            layers=self._layers,
            num_layers=len(layers),
            num_groups=num_groups,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rot_dim=layers[0].cos_sin_cache.shape[1],
            block_size=caches[0][0].shape[2],
            is_gelu=int(shape.is_gelu),
            eps=shape.eps,
            scale=shape.attention_scale,
            soft_cap=shape.attention_soft_cap or 0.0,
        )
        self._step = _Step(groups=self._groups)
        self._model_address = ctypes.addressof(self._model)
        self._step_address = ctypes.addressof(self._step)

    def __call__(
        self, x: Tensor, positions: Tensor, metadata: Sequence[AttentionMetadata], rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers over contiguous x [T, hidden_size]; one metadata per KV cache group.

        Returns (what the last layer's MLP adds, the residual stream before it), both like x; or only `rows` of them,
        int64 [S] rising, each the last token of its request: the others are then spared most of the last layer.

        Raises:
            ValueError: x is not what the layers take.
        """
        if x.shape[1] != self._hidden_size or x.dtype is not self._dtype or not x.is_contiguous():
            raise ValueError(f"x is {list(x.shape)} {x.dtype}, the layers take [*, {self._hidden_size}] {self._dtype}")
        both = torch.empty((2, *x.shape), dtype=x.dtype)
        added, residual = both.unbind()
        first = metadata[0]
        for group, meta in zip(self._groups, metadata, strict=False):
            group.block_tables = meta.block_tables.data_ptr()
            group.slots = meta.slot_mapping.data_ptr()
            group.table_stride = meta.block_tables.stride(0)
        step = self._step
        step.x = x.data_ptr()
        step.added = added.data_ptr()
        step.residual = residual.data_ptr()
        step.rows = None if rows is None else rows.data_ptr()
        step.num_rows = len(x) if rows is None else len(rows)
        step.positions = positions.data_ptr()
        step.query_start_loc = first.query_start_loc.data_ptr()
        step.seq_lens = first.seq_lens.data_ptr()
        step.num_tokens = len(x)
        step.num_requests = len(first.query_lens_list)
        self._run(self._code, self._model_address, self._step_address, self._threads)
        return (added, residual) if rows is None else (added[: len(rows)], residual[: len(rows)])
