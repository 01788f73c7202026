"""What NVML says of the GPUs of this machine, where the package `nvidia-ml-py` and a driver are there.

Reads only. Any failure, at the start or later, means no GPUs are shown: a dashboard does not fail over a sensor.
Memory busy is NVML's share of time in which device memory was read or written: the nearest thing to bandwidth in use
that every card has. Floor 3.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from kvctl.metrics.exposition import printable


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now. None: this card does not say."""

    index: int
    name: str
    used_bytes: int | None
    total_bytes: int | None
    busy: float | None  # share of time a kernel ran, 0 to 1
    memory_busy: float | None  # share of time memory was accessed, 0 to 1
    power_w: float | None
    power_limit_w: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`."""
        return {
            "index": self.index,
            "name": self.name,
            "used_bytes": self.used_bytes,
            "total_bytes": self.total_bytes,
            "utilization": self.busy,
            "memory_utilization": self.memory_busy,
            "power_w": self.power_w,
            "power_limit_w": self.power_limit_w,
        }


class GpuReader:
    """Holds NVML open between readings. Without NVML it reads nothing."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def read(self) -> tuple[GpuReading, ...]:
        """Return every GPU; empty where there is none or NVML fails."""
        nvml = self._nvml
        if nvml is None:
            return ()
        try:
            count = nvml.nvmlDeviceGetCount()
            return tuple(self._read_one(index) for index in range(count))
        except nvml.NVMLError:
            return ()

    def close(self) -> None:
        """Let NVML go."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _read_one(self, index: int) -> GpuReading:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = nvml.nvmlDeviceGetName(handle)
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        busy = self._ask("nvmlDeviceGetUtilizationRates", handle)
        power = self._ask("nvmlDeviceGetPowerUsage", handle)
        limit = self._ask("nvmlDeviceGetEnforcedPowerLimit", handle)
        return GpuReading(
            index=index,
            name=printable(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name), limit=40),
            used_bytes=None if memory is None else int(memory.used),
            total_bytes=None if memory is None else int(memory.total),
            busy=None if busy is None else busy.gpu / 100,
            memory_busy=None if busy is None else busy.memory / 100,
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
        )

    def _ask(self, function: str, handle: Any) -> Any:
        """One question; None where this card or driver does not answer it."""
        try:
            return getattr(self._nvml, function)(handle)
        except self._nvml.NVMLError:
            return None
