"""Memory for packed weights: tensors that do not touch each other, from mappings that go when the last tensor goes."""

import ctypes
import gc
import itertools
import mmap
from pathlib import Path

import pytest
import torch

from kvctl_kernels.cpu_memory import CHUNK_BYTES, Arena

LINE_BYTES = 64


def mapped_bytes():
    """Of this process, as the kernel counts it."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * 4096


def test_tensors_are_whole_and_share_no_cache_line():
    arena = Arena()
    counts = [0, 1, 15, 16, 17, 1000, 3, CHUNK_BYTES // 4 - 100, 7, CHUNK_BYTES // 2, 5, CHUNK_BYTES // 16 - 1, 40]
    tensors = [arena.empty(count) for count in counts]
    for index, tensor in enumerate(tensors):
        tensor.fill_(index)
    for index, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        assert tensor.shape == (count,) and tensor.dtype is torch.int32
        assert tensor.is_contiguous() and tensor.data_ptr() % LINE_BYTES == 0
        assert (tensor == index).all()
    spans = sorted(
        (t.data_ptr() // LINE_BYTES, (t.data_ptr() + 4 * len(t) - 1) // LINE_BYTES) for t in tensors if len(t)
    )
    assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_a_mapping_goes_with_its_last_tensor():
    arena = Arena()
    half = 1 << 29  # other tests' leftovers may go meanwhile: half of it tells there from gone
    gc.collect()
    before = mapped_bytes()
    kept = arena.empty(1 << 28)  # 1 GiB of addresses, no memory until written
    assert mapped_bytes() - before > half
    view = kept[5:6]
    del kept
    gc.collect()
    view.fill_(3)
    assert view.item() == 3 and mapped_bytes() - before > half
    del view
    gc.collect()
    assert mapped_bytes() - before < half


def test_more_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError, match="bytes"):
        Arena().empty(1 << 58)


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch):
    def refuse(self, option):
        raise OSError(22, "Invalid argument")

    class Pages(mmap.mmap):
        madvise = refuse

    monkeypatch.setattr("kvctl_kernels.cpu_memory.mmap.mmap", Pages)
    tensor = Arena().empty(100)
    tensor.fill_(9)
    assert ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_int32))[99] == 9
