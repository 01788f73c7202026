"""Shapes, device and clock of one run: a GPU, or the interpreter at a tiny scale."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvctl.sizing.kernel_time import Ceilings

L2_BYTES = 64 << 20  # sets of K/V are rotated so that none is found in the cache


class Bench:
    """What a part is given. `results`: the file with what other processes found before."""

    def __init__(self, dry: bool, allowed_s: float, results: Path) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda", None if dry else 0)
        self._results = results
        self._allowed_s = allowed_s
        self._started_s = time.monotonic()
        self._blocker: torch.Tensor | None = None

    def is_late(self) -> bool:
        """Whether this process has used nine tenths of its time."""
        return time.monotonic() - self._started_s > 0.9 * self._allowed_s

    def ops(self) -> Any:
        """The Triton kernels for this device."""
        from kvctl_kernels.triton_ops import TritonOps

        if not self.dry:
            return TritonOps(self.device)
        from tests.support.triton_interpreter import repair

        repair()
        return TritonOps(self.device, arch="sm_90", num_multiprocessors=4)

    def ceilings(self) -> Ceilings:
        """The rates that the part of that name measured; 1 where it did not."""
        try:
            rows = json.loads(self._results.read_text())["parts"]["ceilings"]["rows"]
            return Ceilings(rows[0]["bytes_per_s"], rows[0]["flop_per_s"])
        except (OSError, KeyError, IndexError):
            return Ceilings(1.0, 1.0)

    def median_s(self, run: Callable[[int], Any], repeats: int = 20) -> float | None:
        """Median time of `run(i)` on the device, after warm-up. None: not measured (dry run).

        A few large products go first, so that all launches stand in the queue before the first is measured: kernels are
        timed, not the host that launches them.
        """
        run(0)
        if self.dry:
            return None
        for index in range(3):
            run(index)
        if self._blocker is None:
            self._blocker = torch.randn(8192, 8192, device=self.device).bfloat16()
        torch.cuda.synchronize()
        for _ in range(8):  # some 12 ms on an H100
            self._blocker @ self._blocker
        pairs = []
        for index in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run(index)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) for start, end in pairs)[repeats // 2] / 1e3
