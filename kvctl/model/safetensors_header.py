"""What a safetensors file holds, from its header alone: names, dtypes, shapes, bytes. Never reads a weight.

Knows the file format, no model. A header is untrusted: its length is checked against the file before it is read.
Floor 0. Source: https://github.com/huggingface/safetensors#format (8 bytes of length, then JSON).
"""

import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from kvctl.errors import ModelBroken
from kvctl.model.dtypes import safetensors_bits

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
Read = Callable[[int, int], bytes]  # (offset, length) -> bytes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `num_bytes` as stored, `num_elements` as shaped (packed formats hold several weights in each)."""

    name: str
    dtype: str
    num_elements: int
    num_bytes: int


def parse_header(raw: bytes, where: str) -> list[TensorInfo]:
    """Read the JSON of a header.

    Raises:
        ModelBroken: not a header.
    """
    try:
        entries = json.loads(raw)
        if not isinstance(entries, dict):
            raise ValueError("not an object")
        tensors = []
        for name, entry in entries.items():
            if name == "__metadata__":
                continue
            dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
            if end < begin or begin < 0:
                raise ValueError(f"{name} ends before it begins")
            elements = prod(entry["shape"])
            bits = safetensors_bits(dtype)
            if bits is not None and -(-elements * bits // 8) != end - begin:
                raise ValueError(f"{name} has {end - begin} bytes for {elements} elements of {dtype}")
            tensors.append(TensorInfo(name, dtype, elements, end - begin))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelBroken(f"{where} has a damaged safetensors header: {error}", hint="Download it again.") from error
    return tensors


def read_header(read: Read, file_bytes: int, where: str) -> list[TensorInfo]:
    """Read a header through `read`, of a file of `file_bytes`.

    Raises:
        ModelBroken: the file is too short, or its header's length is a lie.
    """
    start = read(0, 8) if file_bytes >= 8 else b""
    if len(start) < 8:
        raise ModelBroken(f"{where} is {file_bytes} bytes: too short for safetensors", hint="Download it again.")
    (length,) = struct.unpack("<Q", start)
    if length < 2 or length > file_bytes - 8 or length > MAX_HEADER_BYTES:
        raise ModelBroken(
            f"{where} claims a header of {length:,} bytes in a file of {file_bytes:,}", hint="Download it again."
        )
    raw = read(8, length)
    if len(raw) != length:
        raise ModelBroken(f"{where} ends inside its header", hint="Download it again.")
    return parse_header(raw, where)


def file_tensors(path: Path) -> list[TensorInfo]:
    """The tensors of one local file.

    Raises:
        ModelBroken: as for `read_header`, or the data end before the header says.
    """
    with path.open("rb") as file:
        size = path.stat().st_size

        def read(offset: int, length: int) -> bytes:
            file.seek(offset)
            return file.read(length)

        tensors = read_header(read, size, path.name)
        header_length = struct.unpack("<Q", read(0, 8))[0]
    stored = sum(t.num_bytes for t in tensors)
    if 8 + header_length + stored > size:
        raise ModelBroken(
            f"{path.name} has {size:,} bytes, its header promises {8 + header_length + stored:,}",
            hint="The download was cut short; fetch it again.",
        )
    return tensors


def loaded_tensors(tensors: Iterable[TensorInfo], *, num_layers: int, tied: bool) -> list[TensorInfo]:
    """The tensors that a server loads: draft (MTP) layers and the second copy of a tied table left out."""
    kept = []
    listed = list(tensors)
    names = {t.name for t in listed}
    has_embedding = any(name.endswith("embed_tokens.weight") for name in names)
    for tensor in listed:
        parts = tensor.name.split(".")
        if parts[0] == "mtp" or (tied and has_embedding and tensor.name.endswith("lm_head.weight")):
            continue
        if "layers" in parts[:-1] and "vision" not in tensor.name and "visual" not in tensor.name:
            index = parts[parts.index("layers") + 1]
            if index.isdigit() and int(index) >= num_layers and "encoder" not in parts:
                continue
        kept.append(tensor)
    return kept
