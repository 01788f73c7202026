"""Matrix products with weights, in the layout that the chosen backend computes fastest with.

Knows no model: a weight, an optional bias, a backend. `prepack()` is called once, after the weight is loaded; from
then on the row-major weight may be gone and only the packed one is kept. Floor 2.

Backends, by `select_linears`:
    native   CPU, float32 and bfloat16: the compiled kernels, one packed copy for any number of rows; a row's result
             does not depend on the rows beside it. Measured at least as fast as oneDNN up to 256 rows on AVX512-BF16.
    onednn   CPU, bfloat16, where native cannot be had or the CPU has AMX tiles, which only oneDNN uses: prepacked.
    torch    everything else: the weight as it is.
"""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kvctl.engine.config import CpuKernels
from kvctl.errors import ConfigError
from kvctl_kernels.cpu_build import NativeUnavailable, load_native
from kvctl_kernels.cpu_linear import NativeLinears
from kvctl_kernels.cpu_ops import DTYPE_CODES


class PackedLinear(Protocol):
    """A weight [N, K] in a backend's own layout."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N]."""

    def rows(self, indices: Tensor) -> Tensor:
        """Rows `indices` int64 [T] of the weight, [T, K]: an embedding tied to this linear."""


class LinearBackend(Protocol):
    """How weights are laid out and multiplied."""

    @property
    def name(self) -> str:
        """What to show: 'torch', 'onednn', 'native'."""

    @property
    def reason(self) -> str:
        """Why a slower one than asked for was chosen; empty if it was not."""

    def can_pack(self, weight: Tensor) -> bool:
        """Whether the backend has a layout for this weight."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Lay out weight [N, K]; may keep it or copy it."""


class TorchLinear:
    """The weight as it is, multiplied by torch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

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

    def can_pack(self, weight: Tensor) -> bool:
        """Any weight."""
        return True

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Keep the weight as it is."""
        return TorchLinear(weight, bias)


class OneDnnLinear:
    """A bfloat16 weight reordered by oneDNN. A row-major copy is made only if `rows` is ever called."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_BATCH_HINT)
        self._bias = bias
        self._row_major: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """See `PackedLinear`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def rows(self, indices: Tensor) -> Tensor:
        """See `PackedLinear`. The first call costs a second copy of the weight."""
        if self._row_major is None:
            self._row_major = self._packed.to_dense()
        return F.embedding(indices, self._row_major)


_ONEDNN_BATCH_HINT = 16  # rows; measured to make no difference


class OneDnnLinears:
    """Prepacks bfloat16 weights through torch's private oneDNN operators."""

    name = "onednn"

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def can_pack(self, weight: Tensor) -> bool:
        """Bfloat16 only."""
        return weight.dtype is torch.bfloat16

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Reorder the weight."""
        return OneDnnLinear(weight, bias)


def _has_onednn() -> bool:
    """Whether this torch has the private operators and they give the right answer: they may change any release."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weight = torch.eye(32, dtype=torch.bfloat16)
        return torch.equal(OneDnnLinear(weight, None)(weight), weight)
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return False


def _has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def select_linears(
    device: torch.device | str, dtype: torch.dtype, cpu_kernels: CpuKernels = "auto", num_threads: int | None = None
) -> LinearBackend:
    """Choose the linear backend for this device and dtype. `num_threads`: CPU only, None takes torch's setting.

    Raises:
        ConfigError: "native" was asked for and cannot be had.
    """
    if torch.device(device).type != "cpu" or cpu_kernels == "torch":
        return TorchLinears()
    is_bf16 = dtype is torch.bfloat16
    if cpu_kernels == "auto" and is_bf16 and _has_amx() and _has_onednn():
        return OneDnnLinears()
    try:
        if dtype not in DTYPE_CODES:
            raise NativeUnavailable(f"native CPU kernels compute in float32 and bfloat16, not in {dtype}")
        return NativeLinears(load_native(), num_threads or torch.get_num_threads())
    except NativeUnavailable as error:
        if cpu_kernels == "native":
            raise ConfigError(f"no native CPU kernels: {error}", hint="Leave --cpu-kernels at auto.") from error
        reason = f"no native CPU kernels: {error}"
        return OneDnnLinears(reason) if is_bf16 and _has_onednn() else TorchLinears(reason)


class Linear:
    """weight [N, K] and optional bias [N]. Fill `weight`, then call `prepack()` once; it works before that too."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, backend: LinearBackend | None = None) -> None:
        self.weight: Tensor | None = weight  # None once packed elsewhere
        self.bias = bias
        self._backend = backend or TorchLinears()
        self._packed: PackedLinear = TorchLinear(weight, bias)

    def prepack(self) -> None:
        """Hand the weight to the backend and drop our reference to the row-major one."""
        if self.weight is None or not self._backend.can_pack(self.weight):
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
    def packed(self) -> PackedLinear:
        """The weight as the backend holds it, for what computes several operations at once."""
        return self._packed
