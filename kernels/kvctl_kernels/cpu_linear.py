"""Linears by the compiled CPU kernels: one packed copy of the weight serves any number of rows.

Knows tensors and the C interface. Float32 and bfloat16. A row's result is the same bit for bit whatever rows stand
beside it; for float32 that makes greedy and seeded output independent of batching.
"""

import ctypes

import torch
from torch import Tensor

from kvctl_kernels.cpu_memory import Arena
from kvctl_kernels.cpu_ops import DTYPE_CODES, declare


class NativeLinear:
    """A weight [N, K] in panels of 32 outputs (see cpu_linear.h), and an optional bias [N]."""

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: Tensor,
        bias: Tensor | None,
        num_threads: int,
        per_word: int,
        arena: Arena,
    ) -> None:
        self._library = library
        self._dtype = weight.dtype
        self._code = DTYPE_CODES[weight.dtype]
        self._threads = num_threads
        self._per_word = per_word
        self._outputs, self._inputs = weight.shape
        self._words = self._inputs // per_word
        weight = weight.contiguous()
        self._packed = arena.empty(library.kvctl_packed_words(self._outputs, self._words))
        library.kvctl_pack(weight.data_ptr(), self._outputs, self._words, self._packed.data_ptr(), num_threads)
        self._bias = None if bias is None else bias.float().contiguous()
        self._weight_address = self._packed.data_ptr()
        self._bias_address = None if self._bias is None else self._bias.data_ptr()
        self.packed_bytes = self._packed.numel() * 4

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the packed weight and of the float32 bias; valid while this object lives."""
        return self._weight_address, self._bias_address

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]; rows of x may be strided.

        Raises:
            ValueError: x is of another width or dtype than the weight.
        """
        rows, width = x.shape
        if width != self._inputs or x.dtype is not self._dtype:
            raise ValueError(f"x is {list(x.shape)} {x.dtype}, the weight takes [*, {self._inputs}] {self._dtype}")
        if x.stride(1) != 1 or x.stride(0) % self._per_word:
            x = x.contiguous()
        y = torch.empty((rows, self._outputs), dtype=self._dtype)
        self._library.kvctl_linear(
            self._code,
            x.data_ptr(),
            x.stride(0) // self._per_word,
            rows,
            self._weight_address,
            self._words,
            self._bias_address,
            y.data_ptr(),
            self._outputs,
            self._outputs,
            self._threads,
        )
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` int64 [T] of the weight, [T, K].

        Raises:
            IndexError: an index outside the weight.
        """
        indices = indices.contiguous()
        out = torch.empty((len(indices), self._inputs), dtype=self._dtype)
        wrong = self._library.kvctl_unpack_rows(
            self._weight_address,
            self._outputs,
            self._words,
            indices.data_ptr(),
            len(indices),
            out.data_ptr(),
            self._threads,
        )
        if wrong >= 0:
            raise IndexError(f"row {int(indices[wrong])} of a weight with {self._outputs} rows")
        return out


class NativeLinears:
    """Packs weights for the compiled kernels."""

    name = "native"
    reason = ""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        declare(library)
        self._library = library
        self._threads = num_threads
        self._arena = Arena()

    def can_pack(self, weight: Tensor) -> bool:
        """Whether this weight has a packed form: a bfloat16 one needs an even number of inputs."""
        return weight.dtype in DTYPE_CODES and weight.shape[1] % (4 // weight.element_size()) == 0

    def pack(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """Copy the weight into panels. The caller checks `can_pack` first."""
        return NativeLinear(self._library, weight, bias, self._threads, 4 // weight.element_size(), self._arena)
