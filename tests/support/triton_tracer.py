"""Watches every load and store of an interpreted kernel: in bounds, how many bytes, how many 32-byte sectors.

A sector is what a GPU's memory moves at least. Only tensors given to `trace` may be touched; anything else is an
AccessError, which makes the tracer a sanitizer.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

SECTOR_BYTES = 32


class AccessError(IndexError):
    """A kernel touched memory that was not given to it."""


@dataclass
class Traffic:
    """What was moved of one tensor. `sectors` counts one per operation that touched it, `unique_sectors` only once."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    sectors: int = 0
    seen: set[int] = field(default_factory=set)

    @property
    def unique_sectors(self) -> int:
        return len(self.seen)


def _range(name: str, tensor: torch.Tensor) -> tuple[str, int, int, int]:
    size = tensor.element_size()
    return name, tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * size, size


@contextmanager
def trace(made: Mapping[str, torch.Tensor] | None = None, **tensors: torch.Tensor) -> Iterator[dict[str, Traffic]]:
    """Run kernels inside; yields the traffic per tensor name. `made` may grow meanwhile: what launchers allocate."""
    given = [_range(name, tensor) for name, tensor in tensors.items()]
    traffic = {name: Traffic() for name in tensors}
    builder = interpreter.InterpreterBuilder
    plain_load, plain_store = builder.create_masked_load, builder.create_masked_store

    def note(ptrs: Any, mask: Any, is_store: bool) -> None:
        addresses = np.asarray(ptrs.data).astype(np.int64)[np.broadcast_to(mask.data, np.shape(ptrs.data))]
        if not addresses.size:
            return
        for name, start, end, size in [*given, *(_range(*item) for item in (made or {}).items())]:
            if start <= addresses[0] < end:
                if addresses.min() < start or addresses.max() + size > end:
                    raise AccessError(
                        f"{name}: {addresses.min() - start} .. {addresses.max() - start} of {end - start}"
                    )
                entry = traffic.setdefault(name, Traffic())
                unique = np.unique(addresses)
                if is_store:
                    entry.stored_bytes += unique.size * size
                else:
                    entry.loaded_bytes += unique.size * size
                sectors = np.unique(unique // SECTOR_BYTES)
                entry.sectors += sectors.size
                entry.seen.update(sectors.tolist())
                return
        raise AccessError(f"address {addresses[0]:#x} belongs to no tensor")

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, False)
        return plain_load(self, ptrs, mask, *rest)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note(ptrs, mask, True)
        return plain_store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    try:
        yield traffic
    finally:
        builder.create_masked_load, builder.create_masked_store = plain_load, plain_store
