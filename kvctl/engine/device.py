"""Where the model runs: device, dtype, threads, and how much memory is free there.

Knows no model but its config.json's dtype. Limits of a container (cgroup v1 and v2) count as the machine's memory.
Floor 2.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvctl.engine.config import DeviceConfig, Dtype, KVCacheDtype
from kvctl.errors import ConfigError, ModelBroken

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(config: DeviceConfig) -> torch.device:
    """Choose the device: 'auto' takes the first CUDA device if there is one.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "--device is cuda, but torch finds no CUDA device",
            hint="Install a CUDA build of torch and a driver, or use --device cpu.",
        )
    return torch.device("cuda", 0) if has_cuda and config.device != "cpu" else torch.device("cpu")


def resolve_dtype(asked: Dtype, model_config: Mapping[str, Any], *, allows_float16: bool) -> torch.dtype:
    """Choose the dtype of weights, activations and cache.

    'auto' is the checkpoint's own, with float32 served as bfloat16 (half the memory; what other servers do too).

    Raises:
        ModelBroken: config.json names a dtype that does not exist.
        ConfigError: float16 for a model that overflows in it.
    """
    named = model_config.get("dtype") or model_config.get("torch_dtype") or "bfloat16"
    name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelBroken(
            f"config.json: the dtype {name!r} is not one of {', '.join(DTYPES)}",
            hint="Correct 'dtype' (or 'torch_dtype') in config.json, or download the model again.",
        )
    if asked == "auto":
        own = DTYPES[name]
        if own is torch.float32 or (own is torch.float16 and not allows_float16):
            return torch.bfloat16
        return own
    if asked == "float16" and not allows_float16:
        raise ConfigError(
            "--dtype float16 cannot hold this model's activations", hint="Use --dtype bfloat16 or float32."
        )
    return DTYPES[asked]


def amd_arch(device: torch.device) -> str | None:
    """The architecture of an AMD GPU, like 'gfx942'; None for anything else."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]


def resolve_kv_dtype(asked: KVCacheDtype, model_dtype: torch.dtype, amd: str | None = None) -> torch.dtype:
    """Choose the dtype of the KV cache: the model's, or a float8 (half the bytes of bfloat16).

    `amd`: see `amd_arch`. gfx942 (MI300) has an e4m3 of its own, without negative zero and up to 240.

    Raises:
        ConfigError: a float8 that the kernels cannot have on this AMD GPU.
    """
    if asked == "auto":
        return model_dtype
    if amd is None:
        return torch.float8_e5m2 if asked == "fp8_e5m2" else torch.float8_e4m3fn
    if amd == "gfx942" and asked != "fp8_e5m2":
        return torch.float8_e4m3fnuz
    raise ConfigError(
        f"--kv-cache-dtype {asked} is not supported on AMD {amd}",
        hint="Use --kv-cache-dtype auto" + (" or fp8 (e4m3)." if amd == "gfx942" else "; fp8 needs gfx942 (MI300)."),
    )


def download(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy to the host what a step found out: one wait for all of them, and the only one of a step."""
    if not tensors or tensors[0].device.type == "cpu":
        return list(tensors)
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to the device; on a GPU the host does not wait, which it would for unpinned memory."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def set_cpu_threads(num_threads: int | None) -> int:
    """Set torch's threads within an operation; None keeps what torch chose. Returns the number in force."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max": no limit


def _cgroup_free_bytes(root: Path) -> int | None:
    """Bytes left under the container's limit; cached file pages count as free. None: no limit."""
    for limit_name, used_name, stat_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _read_int(root / limit_name), _read_int(root / used_name)
        if limit is None or used is None:
            continue
        reclaimable = 0
        stat = (root / used_name).parent / "memory.stat"
        if stat.exists():
            for line in stat.read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == stat_key:
                    reclaimable = int(value)
        return max(0, limit - used + reclaimable)
    return None


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be taken without swapping, within the container's limit; None where it cannot be told."""
    found: list[int] = []
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    in_container = _cgroup_free_bytes(cgroup)
    if in_container is not None:
        found.append(in_container)
    return min(found, default=None)


def free_device_bytes(device: torch.device) -> int | None:
    """Memory that can be taken on the device now; None where it cannot be told."""
    if device.type != "cuda":
        return available_host_bytes()
    free, _total = torch.cuda.mem_get_info(device)
    return int(free)
