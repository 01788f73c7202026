"""Read .safetensors files by memory map: the header first, checked in full, then ranges of bytes.

Knows no model and no dtype conversion. The safetensors package is not used because a damaged file must be told by
name before anything is loaded, and pages must be given back as soon as they are copied. Floor 2.
Source: the format as described in the README of github.com/huggingface/safetensors (8 bytes of header length, a JSON
header with dtype, shape and data_offsets per tensor, then the data).
"""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from kvctl.errors import ModelBroken

READABLE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_AGAIN = "Download that file again."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `start` and `end` are offsets in the file, in bytes. `dtype` None: one we cannot read."""

    dtype_name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    end: int


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _entry(path: Path, name: str, raw: object, data_start: int, file_bytes: int) -> TensorEntry:
    fields = raw if isinstance(raw, dict) else {}
    dtype_name, dims, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not (isinstance(dtype_name, str) and _is_sizes(dims) and _is_sizes(offsets) and len(offsets) == 2):
        raise ModelBroken(f"{path}: the header's entry of {name!r} is damaged", hint=_AGAIN)
    shape, (begin, end) = tuple(dims), offsets
    count = math.prod(shape)
    dtype = READABLE_DTYPES.get(dtype_name)
    if end < begin or (dtype is not None and end - begin != count * dtype.itemsize):
        raise ModelBroken(f"{path}: tensor {name!r} has {end - begin} bytes for shape {list(shape)}", hint=_AGAIN)
    if data_start + end > file_bytes:
        raise ModelBroken(
            f"{path}: the file is cut short: {file_bytes} bytes, but tensor {name!r} ends at {data_start + end}",
            hint=_AGAIN,
        )
    return TensorEntry(dtype_name, dtype, shape, data_start + begin, data_start + end)


class SafetensorsFile:
    """One open file. `entries` is complete and checked once the constructor returns.

    Raises:
        ModelBroken: missing, cut short, or not a safetensors file; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                file_bytes = file.seek(0, 2)
                file.seek(0)
                header_bytes = int.from_bytes(file.read(8), "little")
                if file_bytes < 8 or header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
                    raise ModelBroken(
                        f"{path}: not a safetensors file, or cut short ({file_bytes} bytes)",
                        hint=f"{_AGAIN} (A few bytes of text are a Git LFS pointer: fetch with git lfs pull.)",
                    )
                header = json.loads(file.read(header_bytes))
                # A private writable map: nothing is ever written, but torch refuses read-only memory.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as error:
            raise ModelBroken(f"{path}: the file is missing", hint="Download the model again.") from error
        except OSError as error:
            raise ModelBroken(f"{path}: cannot be read: {error.strerror}", hint="Check the file's rights.") from error
        except (ValueError, RecursionError) as error:
            raise ModelBroken(f"{path}: the header is not JSON: {error}", hint=_AGAIN) from error
        if not isinstance(header, dict):
            raise ModelBroken(f"{path}: the header is not an object", hint=_AGAIN)
        self.entries = {
            name: _entry(path, name, raw, 8 + header_bytes, file_bytes)
            for name, raw in header.items()
            if name != "__metadata__"
        }

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """A view of rows first..last - 1 of a tensor, straight on the map; copy it before `release`.

        A scalar has one row.
        """
        entry = self.entries[name]
        assert entry.dtype is not None  # the caller has checked
        num_rows = entry.shape[0] if entry.shape else 1
        row_bytes = (entry.end - entry.start) // max(1, num_rows)
        raw = torch.frombuffer(
            self._map, dtype=torch.uint8, offset=entry.start + first * row_bytes, count=(last - first) * row_bytes
        )
        return raw.view(entry.dtype).view(last - first, *entry.shape[1:])

    def release(self, name: str) -> None:
        """Give the pages of a tensor back to the system, so that they do not count as our memory."""
        entry = self.entries[name]
        page = mmap.PAGESIZE
        start = entry.start // page * page
        self._map.madvise(mmap.MADV_DONTNEED, start, -(-(entry.end - start) // page) * page)
