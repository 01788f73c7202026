"""A CUDA device without data: its tensors know shape, dtype and strides only, so that host code runs as on a GPU.

What fails here would fail or stall there: tensors of two devices in one operation, a value read back (`.tolist()`, an
`if` on a tensor, a mask used as index), an upload from memory that is not pinned, a launch with an impossible grid.
What it cannot see is what kernels compute. CPU tensors are real.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kvctl_kernels import triton_attention, triton_layer, triton_sampling

DEVICE = torch.device("cuda", 0)
_KERNELS = {
    triton_attention: ("paged_decode_kernel", "paged_prefill_kernel", "merge_attention_states_kernel"),
    triton_layer: (
        "store_kv_kernel", "norm_rotary_store_kv_kernel", "rotary_kernel", "rms_norm_kernel", "gate_and_mul_kernel",
    ),
    triton_sampling: ("race_kernel",),
}  # fmt: skip
_INT32 = ("table_ptr", "seq_lens_ptr", "starts_ptr", "kv_start_ptr")
_INT64 = ("slots_ptr", "positions_ptr", "keys_ptr", "token_ptr")


class Stall(AssertionError):
    """On a GPU the host would wait here."""


class Launches:
    """Stands for a kernel: checks what it is launched with and counts."""

    def __init__(self, kernel: Any, name: str, counts: dict[str, int]) -> None:
        self._names, self._name, self._counts = kernel.arg_names, name, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        x, y, z = (*grid, 1, 1)[:3]
        assert 0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536, (self._name, grid)
        return self._launch

    def _launch(self, *args: Any, **options: Any) -> None:
        given = dict(zip(self._names, args, strict=False)) | options
        missing = set(self._names) - set(given)
        assert not missing, f"{self._name} is launched without {sorted(missing)}"
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                assert not name.endswith("_ptr") or value is None, (self._name, name, value)
                continue
            assert value.device == DEVICE, f"{self._name}: {name} is on {value.device}"
            assert value.dim() == 0 or value.numel() == 0 or value.stride(-1) == 1, (self._name, name, value.stride())
            wanted = torch.int32 if name in _INT32 else torch.int64 if name in _INT64 else value.dtype
            assert value.dtype == wanted, (self._name, name, value.dtype)
        self._counts[self._name] = self._counts.get(self._name, 0) + 1


class _Index:
    """`x[...]` through operators that exist without a CUDA build."""

    @staticmethod
    def view(x: torch.Tensor, index: Any) -> torch.Tensor:
        dim = 0
        for part in index if isinstance(index, tuple) else (index,):
            if part is None:
                x, dim = torch.ops.aten.unsqueeze.default(x, dim), dim + 1
            elif isinstance(part, slice):
                x, dim = torch.ops.aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1), dim + 1
            elif isinstance(part, int | np.integer):
                x = torch.ops.aten.select.int(x, dim, int(part))
            else:
                _Index.check(part)
                x, dim = torch.ops.aten.index.Tensor(x, [None] * dim + [part]), dim + 1
        return x

    @staticmethod
    def check(index: Any) -> None:
        if not isinstance(index, torch.Tensor):
            raise Stall(f"indexing with {type(index).__name__} uploads it from memory that is not pinned")
        if index.dtype == torch.bool:
            raise Stall("a mask as index: its length must be known")
        assert index.device == DEVICE, "an index on the host"

    @staticmethod
    def put(x: torch.Tensor, index: Any, value: Any) -> None:
        if isinstance(index, torch.Tensor | list):
            _Index.check(index)
            wide = value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
            torch.ops.aten.index_put_.default(x, [index], wide)
        elif isinstance(value, torch.Tensor):
            _Index.view(x, index).copy_(value)
        else:
            _Index.view(x, index).fill_(value)


class _Watch(TorchFunctionMode):
    """Sees every operation of the host code."""

    def __init__(self) -> None:
        super().__init__()
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no id is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        name = getattr(func, "__name__", "")
        if x is not None and x.device == DEVICE:
            if name == "__getitem__":
                return _Index.view(*args)
            if name == "__setitem__":
                return _Index.put(*args)
            if name == "__invert__":  # like indexing, it asks for the device
                return torch.logical_not(x)
            if name in ("cpu", "tolist", "item", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
                raise Stall(f"{name}() of a tensor on the device")
        if name == "pin_memory":
            self._pinned.add(id(x))
            self._kept.append(x)
            return x
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if name in ("tensor", "as_tensor") and device == DEVICE:
            raise Stall("torch.tensor(..., device) uploads from memory that is not pinned")
        if name in ("to", "copy_", "cuda") and x is not None:
            source = args[1] if name == "copy_" else x
            moves = (x.device == DEVICE and source.device.type == "cpu") if name == "copy_" else (
                x.device.type == "cpu" and any(arg == DEVICE for arg in (*args[1:], device))
            )  # fmt: skip
            if moves and id(source) not in self._pinned:
                raise Stall(f"{name}() from memory that is not pinned")
            if moves and name != "copy_":
                return torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
            if name == "copy_" and x.device == DEVICE:  # needs a CUDA build to run
                assert torch.broadcast_shapes(x.shape, source.shape) == x.shape, (x.shape, source.shape)
                return x
            if name == "to" and x.device == DEVICE and any(str(arg) == "cpu" for arg in (*args[1:], device)):
                raise Stall("a copy to the host")
        if device == DEVICE or any(isinstance(t, torch.Tensor) and t.device == DEVICE for t in tree_leaves(args)):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


class HostValues:
    """What a download would have brought: `value` everywhere."""

    def __init__(self, shape: torch.Size, value: float) -> None:
        self._shape, self._value = tuple(shape), value

    def tolist(self) -> Any:
        def fill(shape: tuple[int, ...]) -> Any:
            return [fill(shape[1:]) for _ in range(shape[0])] if shape else self._value

        return fill(self._shape)


@contextmanager
def fake_cuda(*, token: int = 7) -> Iterator[dict[str, int]]:
    """Host code inside runs on the fake device; every sampled token is `token`. Yields launches, downloads."""
    counts: dict[str, int] = {}

    def download(tensors: Any) -> list[HostValues]:
        counts["downloads"] = counts.get("downloads", 0) + bool(tensors)
        assert all(tensor.device == DEVICE for tensor in tensors)
        return [HostValues(tensor.shape, token if tensor.dtype == torch.int64 else 0.5) for tensor in tensors]

    def rope_table(rope: Any, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_positions, head_dim, device=device)  # made while loading, when waits do not matter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvctl.engine.models.decoder.build_cos_sin_cache", rope_table)
        for module, names in _KERNELS.items():
            for name in names:
                patch.setattr(module, name, Launches(getattr(module, name), name.removesuffix("_kernel"), counts))
        patch.setattr("kvctl.engine.sampler.download", download)
        patch.setattr("kvctl.engine.logprobs.download", download)
        with FakeTensorMode(), _Watch():
            yield counts
