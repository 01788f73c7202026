"""NVML readings through a stand-in with NVML's own functions and error: there is no GPU where these tests run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvctl.top.gpu import GpuReader
from kvctl.top.lines import gpu_lines
from kvctl.top.look import Look


class Nvml(ModuleType):
    """Two cards; `broken` names the functions that fail."""

    class NVMLError(Exception):
        """As pynvml has it."""

    def __init__(self, broken=()):
        super().__init__("pynvml")
        self.broken = set(broken)
        self.is_open = False

    def _do(self, name, value):
        if name in self.broken:
            raise self.NVMLError(name)
        return value

    def nvmlInit(self):  # noqa: N802
        self._do("nvmlInit", None)
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False
        self._do("nvmlShutdown", None)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self._do("nvmlDeviceGetCount", 2)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return b"NVIDIA H200\x1b[31m" if handle else "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, _handle):  # noqa: N802
        return self._do("nvmlDeviceGetMemoryInfo", SimpleNamespace(used=70 << 30, total=141 << 30))

    def nvmlDeviceGetUtilizationRates(self, _handle):  # noqa: N802
        return self._do("nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=93, memory=71))

    def nvmlDeviceGetPowerUsage(self, _handle):  # noqa: N802
        return self._do("nvmlDeviceGetPowerUsage", 612_000)

    def nvmlDeviceGetEnforcedPowerLimit(self, _handle):  # noqa: N802
        return self._do("nvmlDeviceGetEnforcedPowerLimit", 700_000)


@pytest.fixture
def install(monkeypatch):
    def do(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return do


def test_every_card_is_read_in_plain_units(install):
    nvml = install(Nvml())
    reader = GpuReader()
    first, second = reader.read()
    assert (first.used_bytes, first.total_bytes) == (70 << 30, 141 << 30)
    assert (first.busy, first.memory_busy, first.power_w, first.power_limit_w) == (0.93, 0.71, 612.0, 700.0)
    assert "\x1b" not in second.name
    (line, _) = gpu_lines((first, second), 100, Look())
    assert line.plain == "GPU 0 NVIDIA H200  70.0 GiB of 141.0 GiB  busy 93%  memory busy 71%  612 of 700 W"
    reader.close()
    assert not nvml.is_open
    assert reader.read() == ()


def test_what_a_card_does_not_say_is_missing(install):
    install(Nvml({"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage",
                  "nvmlDeviceGetEnforcedPowerLimit"}))  # fmt: skip
    first, _ = GpuReader().read()
    assert (first.used_bytes, first.busy, first.memory_busy, first.power_w) == (None,) * 4
    assert gpu_lines((first,), 80, Look())[0].plain == "GPU 0 NVIDIA H200  busy -  memory busy -"
    assert first.to_json()["utilization"] is None


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_fails_means_no_gpus_and_no_crash(install, broken):
    install(Nvml({broken, "nvmlShutdown"}))
    reader = GpuReader()
    assert reader.read() == ()
    reader.close()


def test_without_the_package_there_are_no_gpus(install):
    install(None)
    assert GpuReader().read() == ()
