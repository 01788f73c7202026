"""Device, dtype, free memory: decided from files and options alone."""

import pytest
import torch

from kvctl.engine.config import DeviceConfig
from kvctl.engine.device import available_host_bytes, resolve_device, resolve_dtype, resolve_kv_dtype
from kvctl.errors import ConfigError, ModelBroken

GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "config", "allows_float16", "expected"),
    [
        ("auto", {"dtype": "bfloat16"}, True, torch.bfloat16),
        ("auto", {"torch_dtype": "float16"}, True, torch.float16),
        ("auto", {"torch_dtype": "torch.float16"}, False, torch.bfloat16),
        ("auto", {"torch_dtype": "float32"}, True, torch.bfloat16),
        ("auto", {}, True, torch.bfloat16),
        ("auto", {"torch_dtype": None}, True, torch.bfloat16),
        ("float32", {"dtype": "bfloat16"}, True, torch.float32),
        ("float16", {"dtype": "bfloat16"}, True, torch.float16),
    ],
)
def test_auto_takes_the_checkpoints_dtype_and_half_of_float32(asked, config, allows_float16, expected):
    assert resolve_dtype(asked, config, allows_float16=allows_float16) is expected


def test_float16_is_refused_where_the_model_overflows_in_it():
    with pytest.raises(ConfigError, match="float16"):
        resolve_dtype("float16", {}, allows_float16=False)


def test_float8_pages_are_the_kind_the_gpu_has():
    assert resolve_kv_dtype("auto", torch.bfloat16, "gfx90a") is torch.bfloat16
    assert (
        resolve_kv_dtype("fp8", torch.bfloat16) is resolve_kv_dtype("fp8_e4m3", torch.bfloat16) is torch.float8_e4m3fn
    )
    assert resolve_kv_dtype("fp8_e5m2", torch.bfloat16) is torch.float8_e5m2
    assert resolve_kv_dtype("fp8", torch.bfloat16, "gfx942") is torch.float8_e4m3fnuz
    with pytest.raises(ConfigError, match="gfx942") as refused:
        resolve_kv_dtype("fp8_e5m2", torch.bfloat16, "gfx942")
    assert "fp8 (e4m3)" in refused.value.hint
    with pytest.raises(ConfigError, match="gfx90a"):
        resolve_kv_dtype("fp8", torch.bfloat16, "gfx90a")


@pytest.mark.parametrize("name", ["float12", "int8", 16, ["bfloat16"]])
def test_an_unknown_dtype_names_the_file(name):
    with pytest.raises(ModelBroken, match=r"config\.json"):
        resolve_dtype("auto", {"dtype": name}, allows_float16=True)


def test_cuda_is_an_error_without_a_device_and_auto_is_not(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert resolve_device(DeviceConfig(device="auto")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="CUDA"):
        resolve_device(DeviceConfig(device="cuda"))


def host(tmp_path, available_kib, files):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\nBuffers: 7 kB\n")
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return available_host_bytes(meminfo, tmp_path / "cgroup")


def test_free_memory_is_what_the_kernel_calls_available(tmp_path):
    assert host(tmp_path, 8 << 20, {}) == 8 * GIB


def test_a_containers_limit_counts_with_its_file_cache_as_free(tmp_path):
    files = {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}"}
    assert host(tmp_path, 8 << 20, files) == 2 * GIB


def test_the_old_spelling_of_container_limits_is_read_too(tmp_path):
    files = {
        "memory/memory.limit_in_bytes": str(4 * GIB),
        "memory/memory.usage_in_bytes": str(1 * GIB),
        "memory/memory.stat": "total_inactive_file 0\n",
    }
    assert host(tmp_path, 8 << 20, files) == 3 * GIB


def test_no_limit_and_a_limit_above_the_machine_change_nothing(tmp_path):
    assert host(tmp_path, 1 << 20, {"memory.max": "max\n", "memory.current": "5\n"}) == GIB
    files = {"memory.max": str(1 << 62), "memory.current": "5"}
    assert host(tmp_path, 1 << 20, files) == GIB


def test_where_nothing_tells_the_memory_is_unknown(tmp_path):
    assert available_host_bytes(tmp_path / "none", tmp_path / "none") is None
