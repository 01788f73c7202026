"""The native CPU kernels as operations on tensors: checks what the C side cannot, passes raw pointers.

Knows tensors and the C interface of `cpu_native.cpp`; no model, no scheduler. Float32 and bfloat16; anything else, and
head sizes that are no multiple of 16, goes to `TorchOps`. Results of a request do not depend on the rest of the batch.
"""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from kvctl_kernels.metadata import AttentionMetadata, KVScales
from kvctl_kernels.reference import TorchOps

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
HEAD_DIM_MULTIPLE = 16  # what attention takes: the lanes of the widest vectors


class _AttentionArguments(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("block_tables", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("output", c_void_p),
        ("query_stride", c_int64),
        ("table_stride", c_int64),
        ("num_requests", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
    )


class _RotaryArguments(ctypes.Structure):
    _fields_ = (
        ("query", c_void_p),
        ("key", c_void_p),
        ("value", c_void_p),
        ("k_cache", c_void_p),
        ("v_cache", c_void_p),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("slots", c_void_p),
        ("query_stride", c_int64),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rot_dim", c_int32),
        ("block_size", c_int32),
    )


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the signatures; idempotent."""
    pointer, size = c_void_p, c_int64
    signatures: dict[str, list[type]] = {
        "kvctl_paged_attention": [c_int, pointer, c_int],
        "kvctl_rotary": [c_int, pointer, c_int],
        "kvctl_rms_norm": [c_int, pointer, size, pointer, pointer, pointer, pointer, *[size] * 4, c_float, c_int],
        "kvctl_gate": [c_int, c_int, pointer, size, pointer, size, size, c_int],
        "kvctl_argmax": [c_int, pointer, size, pointer, size, size, c_int],
        "kvctl_draw": [pointer, size, size, size, *[pointer] * 5, c_int],
        "kvctl_pack": [pointer, size, size, pointer, c_int],
        "kvctl_unpack_rows": [pointer, size, size, pointer, size, pointer, c_int],
        "kvctl_linear": [c_int, pointer, size, size, pointer, size, pointer, pointer, size, size, c_int],
        "kvctl_packed_words": [size, size],
    }
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = None
    library.kvctl_unpack_rows.restype = c_int64
    library.kvctl_packed_words.restype = c_int64


def _packed_heads(x: Tensor) -> Tensor:
    """X [T, heads, D] with contiguous heads: as it is where only the tokens are strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class NativeCpuOps:
    """The operations of `kvctl.engine.ops.Ops` by the compiled kernels, for one dtype."""

    name = "native"
    reason = ""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int) -> None:
        declare(library)
        self.library = self._library = library
        self.dtype = self._dtype = dtype
        self.num_threads = self._threads = num_threads
        self._code = DTYPE_CODES[dtype]
        self._torch = TorchOps()
        self._attention = _AttentionArguments()
        self._meta: AttentionMetadata | None = None  # the one whose pointers stand in self._attention

    @property
    def description(self) -> str:
        """The instruction set the kernels were compiled for."""
        return str(self._library.kvctl_describe().decode())

    def store_kv(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """See `Ops`."""
        if k_cache.dtype is not self._dtype:
            self._torch.store_kv(key, value, k_cache, v_cache, slot_mapping, scales)
            return
        key, value = _packed_heads(key), _packed_heads(value)
        self._rotary(None, key, value, None, None, k_cache, v_cache, slot_mapping)

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ops`; in place where the heads are contiguous."""
        query, key = _packed_heads(query), _packed_heads(key)
        self._rotary(query, key, None, positions, cos_sin_cache, None, None, None)
        return query, key

    def rotary_and_store_kv(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """See `Ops`; the query in place where its heads are contiguous, the key straight into the cache."""
        if k_cache.dtype is not self._dtype:
            query, key = self.rotary(query, key, positions, cos_sin_cache)
            self._torch.store_kv(key, value, k_cache, v_cache, slot_mapping, scales)
            return query
        query, key, value = _packed_heads(query), _packed_heads(key), _packed_heads(value)
        self._rotary(query, key, value, positions, cos_sin_cache, k_cache, v_cache, slot_mapping)
        return query

    def norm_rotary_and_store_kv(
        self,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> Tensor:
        """See `Ops`."""
        query, key = self.rms_norm(query, q_norm, eps), self.rms_norm(key, k_norm, eps)
        return self.rotary_and_store_kv(
            query, key, value, positions, cos_sin_cache, k_cache, v_cache, slot_mapping, scales
        )

    def _rotary(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor | None,
        positions: Tensor | None,
        cos_sin: Tensor | None,
        k_cache: Tensor | None,
        v_cache: Tensor | None,
        slots: Tensor | None,
    ) -> None:
        num_tokens, num_kv_heads, head_dim = key.shape
        arguments = _RotaryArguments(
            None if query is None else query.data_ptr(),
            key.data_ptr(),
            None if value is None else value.data_ptr(),
            None if k_cache is None else k_cache.data_ptr(),
            None if v_cache is None else v_cache.data_ptr(),
            None if positions is None else positions.data_ptr(),
            None if cos_sin is None else cos_sin.data_ptr(),
            None if slots is None else slots.data_ptr(),
            0 if query is None else query.stride(0),
            key.stride(0),
            0 if value is None else value.stride(0),
            num_tokens,
            0 if query is None else query.shape[1],
            num_kv_heads,
            head_dim,
            0 if cos_sin is None else cos_sin.shape[1],
            1 if k_cache is None else k_cache.shape[2],
        )
        self._library.kvctl_rotary(self._code, ctypes.byref(arguments), self._threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops`."""
        if x.dim() == 2:
            rows, inner, width = x.shape[0], 1, x.shape[1]
            strides = (x.stride(0), 0)
        elif x.dim() == 3:
            rows, inner, width = x.shape
            strides = (x.stride(0), x.stride(1))
        else:
            return self._torch.rms_norm(x, weight, eps)
        if x.stride(-1) != 1 or x.dtype is not self._dtype:
            return self._torch.rms_norm(x, weight, eps)
        weight = weight.float()  # models hold them so already
        out = torch.empty(x.shape, dtype=self._dtype)
        self._library.kvctl_rms_norm(
            self._code,
            x.data_ptr(),
            strides[0],
            None,
            None,
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            inner,
            strides[1],
            width,
            eps,
            self._threads,
        )
        return out

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops`; the new residual is a tensor of its own."""
        if (
            x.dim() != 2
            or x.stride(1) != 1
            or not residual.is_contiguous()
            or not (x.dtype is residual.dtype is self._dtype)
        ):
            return self._torch.rms_norm_residual(x, residual, weight, eps)
        weight = weight.float()
        rows, width = x.shape
        out, total = torch.empty_like(residual), torch.empty_like(residual)
        self._library.kvctl_rms_norm(
            self._code,
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            total.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            1,
            0,
            width,
            eps,
            self._threads,
        )
        return out, total

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return self._gate(x, 0)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """See `Ops`."""
        return self._gate(x, 1)

    def _gate(self, x: Tensor, is_gelu: int) -> Tensor:
        rows, width = x.shape
        out = torch.empty((rows, width // 2), dtype=self._dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        self._library.kvctl_gate(
            self._code, is_gelu, x.data_ptr(), x.stride(0), out.data_ptr(), rows, width // 2, self._threads
        )
        return out

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        scales: KVScales | None = None,
    ) -> Tensor:
        """See `Ops`."""
        num_tokens, num_heads, head_dim = query.shape
        if head_dim % HEAD_DIM_MULTIPLE or k_cache.dtype is not self._dtype:
            return self._torch.paged_attention(
                query, k_cache, v_cache, meta, scale=scale, window=window, soft_cap=soft_cap, scales=scales
            )
        query = _packed_heads(query)
        output = torch.empty((num_tokens, num_heads, head_dim), dtype=self._dtype)
        arguments = self._attention
        if self._meta is not meta:
            self._meta = meta  # also keeps its tensors alive while their addresses stand here
            arguments.block_tables = meta.block_tables.data_ptr()
            arguments.query_start_loc = meta.query_start_loc.data_ptr()
            arguments.seq_lens = meta.seq_lens.data_ptr()
            arguments.table_stride = meta.block_tables.stride(0)
            arguments.num_requests = len(meta.query_lens_list)
        arguments.query = query.data_ptr()
        arguments.k_cache = k_cache.data_ptr()
        arguments.v_cache = v_cache.data_ptr()
        arguments.output = output.data_ptr()
        arguments.query_stride = query.stride(0)
        arguments.num_heads = num_heads
        arguments.num_kv_heads = k_cache.shape[1]
        arguments.head_dim = head_dim
        arguments.block_size = k_cache.shape[2]
        arguments.window = window or 0
        arguments.scale = scale
        arguments.soft_cap = soft_cap or 0.0
        self._library.kvctl_paged_attention(self._code, ctypes.byref(arguments), self._threads)
        return output
