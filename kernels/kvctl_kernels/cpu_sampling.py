"""Choosing tokens by the compiled CPU kernels.

Knows tensors and the C interface. A row's token depends on that row and its key alone.
"""

import ctypes

import torch
from torch import Tensor

from kvctl_kernels.cpu_ops import DTYPE_CODES, declare


class NativeSampling:
    """`kvctl.engine.sampler.SamplingKernels` by the compiled kernels."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        declare(library)
        self._library = library
        self._threads = num_threads

    def argmax(self, logits: Tensor) -> Tensor:
        """Index of the largest logit of each row [R, V], the first of equal ones: int64 [R]."""
        code = DTYPE_CODES.get(logits.dtype)
        if code is None or logits.stride(1) != 1:
            return logits.float().argmax(dim=-1)
        rows, width = logits.shape
        out = torch.empty(rows, dtype=torch.int64)
        self._library.kvctl_argmax(
            code, logits.data_ptr(), logits.stride(0), out.data_ptr(), rows, width, self._threads
        )
        return out

    def draw(self, scaled: Tensor, keys: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
        """Draw a token per row: scaled float32 [R, V]; keys int64 [R, 2]; int64 top_k, float32 top_p, min_p [R]."""
        rows, width = scaled.shape
        scaled, keys = scaled.contiguous(), keys.contiguous()
        out = torch.empty(rows, dtype=torch.int64)
        self._library.kvctl_draw(
            scaled.data_ptr(),
            width,
            rows,
            width,
            keys.data_ptr(),
            top_k.contiguous().data_ptr(),
            top_p.contiguous().data_ptr(),
            min_p.contiguous().data_ptr(),
            out.data_ptr(),
            self._threads,
        )
        return out
