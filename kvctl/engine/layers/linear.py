"""Matrix products with weights, in the layout that the chosen backend computes fastest with.

Knows no model: a weight, an optional bias, a backend. `prepack()` is called once, after the weight is loaded; from
then on the row-major weight may be gone and only the packed one is kept. Floor 2.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvctl.engine.config import CpuKernels


class PackedLinear(Protocol):
    """A weight [N, K] in a backend's own layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N]."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` int64 [T] of the weight, [T, K]: an embedding tied to this linear."""

    @property
    def packed_bytes(self) -> int:
        """Memory the weight takes in this layout."""


class LinearBackend(Protocol):
    """How weights are laid out and multiplied."""

    @property
    def name(self) -> str:
        """What to show: 'torch', 'onednn', 'native'."""

    @property
    def reason(self) -> str:
        """Why a slower one than asked for was chosen; empty if it was not."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Lay out weight [N, K]; may keep it or copy it."""


class TorchLinear:
    """The weight as it is, multiplied by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.packed_bytes = weight.numel() * weight.element_size()

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return F.linear(x, self._weight, self._bias)

    def rows(self, indices: Tensor) -> Tensor:
        """See `PackedLinear`."""
        return F.embedding(indices, self._weight)


class TorchLinears:
    """The backend that always works."""

    name = "torch"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Keep the weight as it is."""
        return TorchLinear(weight, bias)


def select_linears(
    device: torch.device | str, dtype: torch.dtype, cpu_kernels: CpuKernels = "auto", num_threads: int | None = None
) -> LinearBackend:
    """Choose the linear backend for this device and dtype. `num_threads`: CPU only, None takes torch's setting."""
    return TorchLinears()


class Linear:
    """weight [N, K] and optional bias [N]. Fill `weight`, then call `prepack()` once; it works before that too."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, backend: LinearBackend | None = None) -> None:
        self.weight: Tensor | None = weight  # None once packed elsewhere
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._backend = backend or TorchLinears()
        self._packed: PackedLinear = TorchLinear(weight, bias)

    def prepack(self) -> None:
        """Hand the weight to the backend and drop our reference to the row-major one."""
        if self.weight is None:
            return
        self._packed = self._backend.pack(self.weight, self.bias)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        return self._packed(x)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weight, for an embedding tied to it: indices int64 [T] -> [T, K]."""
        return self._packed.rows(indices)

    @property
    def packed_bytes(self) -> int:
        """Memory the weight takes."""
        return self._packed.packed_bytes
