"""Which kernels compute: one signature per operation, one choice at start.

Knows no model and no scheduler. `select_ops` decides once, from the device, the dtype and what the user asked for;
the object it returns has no flags to look at in the hot loop. Floor 2.

Shapes, used across the repository: T tokens of the step (all requests one after another), Hq query heads, Hkv KV
heads, D head_dim. Pages are head-major: k_cache, v_cache [num_blocks, Hkv, block_size, D], contiguous.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor

from kvctl.engine.config import CpuKernels
from kvctl.errors import ConfigError
from kvctl_kernels.cpu_build import NativeUnavailable, load_native
from kvctl_kernels.cpu_ops import DTYPE_CODES, NativeCpuOps
from kvctl_kernels.metadata import AttentionMetadata, KVScales
from kvctl_kernels.reference import TorchOps

__all__ = ["AttentionMetadata", "KVScales", "Ops", "TorchOps", "select_ops"]


class Ops(Protocol):
    """The operations of a decoder layer outside its matrix products.

    Inputs over tokens may be views of a wider row (as `qkv.split` gives them): only the last two dimensions of
    [T, heads, D] need to be contiguous. Arguments named as results may be overwritten: use what is returned.
    """

    @property
    def name(self) -> str:
        """What to show as the attention backend: 'torch', 'native', 'triton'."""

    @property
    def reason(self) -> str:
        """Why a slower one than asked for was chosen; empty if it was not."""

    def store_kv(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales | None = None,
    ) -> None:
        """Write key, value [T, Hkv, D] to their slots, int64 [T]; slot -1 is skipped.

        Float8 pages hold the numbers over `scales` (1 where there are none), saturated.
        """

    def rotary(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate query [T, Hq, D] and key [T, Hkv, D]; positions int64 [T]; cos_sin_cache float32 [P, rot_dim].

        A row of the cache holds rot_dim / 2 cosines, then as many sines; x[i] pairs with x[i + rot_dim / 2].
        """

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
        """`rotary` and `store_kv` in one pass; returns the rotated query."""

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
        """`rms_norm` of each head of query and key (weights [D]), then `rotary_and_store_kv`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise over the last dimension; x [..., H] (also per head: [T, heads, D]), weight [H]."""

    def rms_norm_residual(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual), both like x."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: silu(gate) * up."""

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        """x [T, 2 * I], gate first: gelu_tanh(gate) * up."""

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
        """Causal attention of query [T, Hq, D] over the stored keys (this step's included); returns [T, Hq, D]."""


def select_ops(
    device: torch.device | str, dtype: torch.dtype, cpu_kernels: CpuKernels = "auto", num_threads: int | None = None
) -> Ops:
    """Choose the kernels for this device and dtype. `num_threads`: CPU only, None takes torch's setting.

    "auto" takes the native kernels where they can be had and torch otherwise, with the reason; the first call on a
    machine compiles them (seconds).

    Raises:
        ConfigError: "native" was asked for and cannot be had.
    """
    if torch.device(device).type == "cuda":
        return _triton_ops(torch.device(device))
    if torch.device(device).type != "cpu" or cpu_kernels == "torch":
        return TorchOps()
    try:
        if dtype not in DTYPE_CODES:
            raise NativeUnavailable(f"native CPU kernels compute in float32 and bfloat16, not in {dtype}")
        return NativeCpuOps(load_native(), dtype, num_threads or torch.get_num_threads())
    except NativeUnavailable as error:
        if cpu_kernels == "native":
            raise ConfigError(f"no native CPU kernels: {error}", hint="Leave --cpu-kernels at auto.") from error
        return TorchOps(reason=f"no native CPU kernels: {error}")


def _triton_ops(device: torch.device) -> Ops:
    problem = triton_problem(device)
    if problem:
        return TorchOps(reason=f"no Triton kernels, attention will be slow: {problem}")
    from kvctl_kernels.triton_ops import TritonOps

    return TritonOps(device)


@functools.cache
def triton_problem(device: torch.device) -> str:
    """Why Triton's kernels cannot run on this GPU; empty if they can.

    Tries one: Triton needs a C compiler and Python's headers to launch anything, which many machines lack.
    """
    try:
        from kvctl_kernels.triton_ops import TritonOps

        capability = torch.cuda.get_device_capability(device)
        if torch.version.hip is None and capability < (8, 0):
            return (
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, not 8.0"
            )
        x = torch.ones((1, 16), device=device)
        TritonOps(device).rms_norm(x, x[0], 1e-6)
        torch.cuda.synchronize(device)
    except Exception as error:  # whatever compiler, driver or import raise: the engine runs without, and says why
        return f"{type(error).__name__}: {error}"
    return ""
