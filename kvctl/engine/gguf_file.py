"""Read a GGUF file: its metadata, and its tensors as raw quantised rows of a memory map.

Does not know what a model is, nor how to dequantise. Nothing in the file is believed: every length is compared
with the bytes that are there before it is used, so that a damaged file is an error and never a long wait. Floor 2.

Source: the format's specification, docs/gguf.md of the ggml project (version 2 and 3, little endian).
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvctl.errors import ModelBroken, ModelNotFound, ModelNotSupported

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
# Value types of the format -> numpy's little-endian types; 8 and 9 are strings and arrays.
_SCALARS: Final = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_MAX_DIMS: Final = 4  # of a ggml tensor
_DEFAULT_ALIGNMENT: Final = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor as the file describes it. `shape` is in numpy's order: the last dimension is contiguous."""

    name: str
    type_name: str
    type_id: int
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    n_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of the last dimension; a vector is one row."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows


class _Cursor:
    """Reads values one after another; a value that would reach beyond the end is a broken file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def take(self, n_bytes: int) -> bytes:
        end = self.position + n_bytes
        if n_bytes < 0 or end > len(self._data):
            raise ModelBroken(
                f"{self._path} is cut short or damaged: a value of {n_bytes:,} bytes at byte {self.position:,}, "
                f"but the file has {len(self._data):,}",
                hint="Fetch the file again.",
            )
        chunk = self._data[self.position : end]
        self.position = end
        return chunk

    def u32(self) -> int:
        return int(struct.unpack("<I", self.take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])

    def string(self) -> str:
        raw = self.take(self.u64())
        return raw.decode("utf-8", errors="replace")

    def value(self, value_type: int, depth: int = 0) -> Any:
        if value_type == _STRING:
            return self.string()
        if value_type == _ARRAY and depth < _MAX_DIMS:
            item_type, count = self.u32(), self.u64()
            if item_type in _SCALARS:
                dtype = np.dtype(_SCALARS[item_type])
                return np.frombuffer(self.take(count * dtype.itemsize), dtype=dtype).tolist()
            return [self.value(item_type, depth + 1) for _ in range(count)]  # ends at the file's end at the latest
        if value_type in _SCALARS:
            dtype = np.dtype(_SCALARS[value_type])
            return np.frombuffer(self.take(dtype.itemsize), dtype=dtype)[0].item()
        raise ModelBroken(
            f"{self._path} is damaged: value type {value_type} at byte {self.position:,} does not exist",
            hint="Fetch the file again.",
        )


class GgufFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Close it, or use it with `with`."""

    def __init__(self, path: Path) -> None:
        """Read the head of the file; the tensors stay on disk.

        Raises:
            ModelNotFound: no such file.
            ModelBroken: not a GGUF file, or damaged.
            ModelNotSupported: a version, byte order, split or tensor type that is not known here.
        """
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFound(f"there is no file {path}", hint="Check the path.") from None
        except ValueError:  # mmap refuses an empty file
            raise ModelBroken(f"{path} is empty", hint="Fetch the file again.") from None
        except OSError as error:
            raise ModelBroken(f"cannot read {path}: {error.strerror}", hint="Check the file's permissions.") from None
        try:
            self._read_head()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory map. Arrays that `rows` returned must not be used any more."""
        try:
            self._map.close()
        except BufferError:  # an array is still alive somewhere; the map goes with it
            return

    def rows(self, tensor: GgufTensor, start: int = 0, stop: int | None = None) -> NDArray[np.uint8]:
        """Return the raw bytes [stop - start, bytes per row] of some rows, without copying."""
        bytes_per_row = tensor.n_bytes // tensor.num_rows
        stop = tensor.num_rows if stop is None else stop
        view = np.frombuffer(
            self._map, np.uint8, (stop - start) * bytes_per_row, offset=tensor.offset + start * bytes_per_row
        )
        return view.reshape(stop - start, bytes_per_row)

    def _read_head(self) -> None:
        cursor = _Cursor(self._map, self.path)
        if self._map[:4] != _MAGIC:
            raise ModelBroken(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'", hint="Check the path.")
        cursor.take(4)
        version = cursor.u32()
        if version not in (2, 3):
            what = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise ModelNotSupported(
                f"{self.path} is a {what} GGUF file", hint="Little-endian files of version 2 and 3 are supported."
            )
        num_tensors, num_values = cursor.u64(), cursor.u64()
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.u32())
        if self.metadata.get("split.count", 1) > 1:
            raise ModelNotSupported(
                f"{self.path} is one of {self.metadata['split.count']} parts of a split model",
                hint="Join the parts first: llama-gguf-split --merge FIRST_PART OUTPUT.",
            )
        heads = [self._read_tensor_head(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ModelBroken(f"{self.path} is damaged: alignment {alignment!r}", hint="Fetch the file again.")
        data_start = -(-cursor.position // alignment) * alignment
        for head in heads:
            self._add_tensor(*head, data_start)

    @staticmethod
    def _read_tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
        name = cursor.string()
        num_dims = cursor.u32()
        dims = tuple(cursor.u64() for _ in range(min(num_dims, _MAX_DIMS + 1)))
        return name, dims[::-1], cursor.u32(), cursor.u64()

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int, data_start: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        if not shape or len(shape) > _MAX_DIMS or 0 in shape or name in self.tensors:
            raise ModelBroken(
                f"{self.path} is damaged: tensor {name!r} has shape {list(shape)}, or comes twice",
                hint="Fetch the file again.",
            )
        try:
            quant_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise ModelNotSupported(
                f"{self.path}: tensor {name} has the quantisation type {type_id}, which is not known here",
                hint="A newer gguf package may know it: pip install -U gguf.",
            ) from None
        values_per_block, bytes_per_block = GGML_QUANT_SIZES[quant_type]
        if shape[-1] % values_per_block:
            raise ModelBroken(
                f"{self.path} is damaged: rows of {name} have {shape[-1]} values, not a multiple of {values_per_block}",
                hint="Fetch the file again.",
            )
        n_bytes = bytes_per_block * (shape[-1] // values_per_block)
        for size in shape[:-1]:
            n_bytes *= size
        start = data_start + offset
        if start + n_bytes > len(self._map):
            raise ModelBroken(
                f"{self.path} is cut short: tensor {name} ends at byte {start + n_bytes:,}, "
                f"but the file has {len(self._map):,}",
                hint="Fetch the file again.",
            )
        self.tensors[name] = GgufTensor(name, quant_type.name, type_id, shape, start, n_bytes)
