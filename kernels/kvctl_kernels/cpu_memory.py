"""Memory for what every step reads from end to end: in huge pages where the kernel has them.

With pages of 4 KB the processor's own read-ahead stops at every page's end and each page costs a look-up; in pages of
2 MB the packed weights of a small model stream up to a fifth faster, and scattered KV blocks a tenth (measured). Knows
tensors, nothing of models.
Invariant: tensors of one arena share no cache line.
"""

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 16 << 20
_HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


class Arena:
    """Hands out tensors from large mappings; a mapping goes when the last tensor in it goes."""

    def __init__(self) -> None:
        self._chunk: Tensor | None = None  # uint8
        self._used_bytes = 0

    def empty(self, count: int) -> Tensor:
        """An int32 tensor of `count` elements, contents undefined (zero).

        Raises:
            MemoryError: there is no more.
        """
        size_bytes = -(-count * 4 // _LINE_BYTES) * _LINE_BYTES
        if self._chunk is None or self._used_bytes + size_bytes > len(self._chunk):
            if size_bytes > CHUNK_BYTES // 4:  # a mapping of its own; go on filling the chunk after it
                return _weight_pages(size_bytes)[: count * 4].view(torch.int32)
            self._chunk = _weight_pages(CHUNK_BYTES)
            self._used_bytes = 0
        first = self._used_bytes
        self._used_bytes += size_bytes
        return self._chunk[first : first + count * 4].view(torch.int32)


def _weight_pages(size_bytes: int) -> Tensor:
    """`zero_pages`, after the heap gave back what weights were read into before they were packed."""
    with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has it
        ctypes.CDLL(None).malloc_trim(0)
    return zero_pages(size_bytes)


def zero_pages(size_bytes: int) -> Tensor:
    """Zero bytes straight from the kernel, uint8 [size_bytes], from the start of a huge page.

    They cost nothing until they are written, also in a process that has freed memory before (calloc would hand that out
    and write zeros over it).

    Raises:
        MemoryError: there is no more.
    """
    try:
        pages = mmap.mmap(-1, size_bytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise MemoryError(f"{size_bytes} bytes: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: small pages hold the same
            pages.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(pages, dtype=torch.uint8)  # keeps the mapping alive
    first = -mapped.data_ptr() % _HUGE_PAGE_BYTES
    return mapped[first : first + size_bytes]
