"""HardwareProfile: what an accelerator can hold and move, from profiles/hardware/*.yaml.

Knows one device, not a machine; numbers as the datasheets and drivers print them, each with its source. Numbers
listed in `unverified` were recalled or estimated: whoever prints them must mark them. Floor 0.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError
from kvctl.model.profiles import profiles_folder
from kvctl.units import GIB

_GUESSED_NAMES = 5  # how many close names a hint lists


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """One accelerator. `tflops` maps fp16, bf16, fp8, fp4, int8 to dense TFLOP/s."""

    id: str
    name: str
    vendor: str
    arch: str
    memory_gb: float
    torch_total_gib: float
    bandwidth_gb_s: float
    tflops: Mapping[str, float]
    tdp_w: float | None
    interconnect: str
    interconnect_gb_s: float
    host_link: str | None
    host_link_gb_s: float | None
    usd_per_hour: tuple[float, float] | None
    aliases: tuple[str, ...]
    as_of: str
    sources: Mapping[str, str]
    unverified: frozenset[str]
    note: str | None
    layer_overhead_s: float = 0.0  # of a step, per layer, beside bytes and operations: measured CPU profiles only

    @property
    def total_bytes(self) -> int:
        """Memory that an engine sees and multiplies by its utilisation."""
        return int(self.torch_total_gib * GIB)

    @property
    def is_cpu(self) -> bool:
        """Whether this is a CPU's profile: KV memory is then system memory."""
        return self.vendor == "cpu"

    def compute_flops(self, weight_format: str, dtype: str) -> tuple[float, str]:
        """Dense FLOP/s at which matrices run, and the format they run in.

        Weight-only formats (int4, GGUF) compute in the model's own; fp8 and NVFP4 where the device can.
        """
        wanted = {"fp8": "fp8", "nvfp4": "fp4", "int8": "int8", "w8a8": "int8"}.get(weight_format)
        if wanted and self.tflops.get(wanted):
            return self.tflops[wanted] * 1e12, wanted
        plain = "fp16" if dtype in ("float16", "half", "fp16") else "bf16"
        for name in (plain, "bf16", "fp16", "fp32"):
            if self.tflops.get(name):
                return self.tflops[name] * 1e12, name
        raise KvctlError(f"the profile of {self.id} gives no FLOP rate", hint="Correct its dense_tflops.")


def _plain(name: str) -> str:
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    for prefix in ("nvidia-", "amd-instinct-", "amd-", "intel-", "google-"):
        text = text.removeprefix(prefix)
    return text


def load_hardware(path: Path) -> HardwareProfile:
    """Read one profile.

    Raises:
        KvctlError: the file is not a hardware profile.
    """
    import yaml  # 10 ms that `kvctl size` without --gpu need not pay

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        raw: Any = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)  # a SafeLoader either way
        price = raw["usd_per_hour"]
        link = raw.get("host_link")
        return HardwareProfile(
            id=raw["id"],
            name=raw["name"],
            vendor=raw["vendor"],
            arch=raw["arch"],
            memory_gb=float(raw["memory_gb"]),
            torch_total_gib=float(raw["torch_total_gib"]),
            bandwidth_gb_s=float(raw["bandwidth_gb_s"]),
            tflops={k: float(v) for k, v in raw["dense_tflops"].items() if v is not None},
            tdp_w=None if raw["tdp_w"] is None else float(raw["tdp_w"]),
            interconnect=raw["interconnect"]["type"],
            interconnect_gb_s=float(raw["interconnect"]["gb_s"]),
            host_link=link["type"] if link else None,
            host_link_gb_s=float(link["gb_s"]) if link else None,
            usd_per_hour=(float(price["low"]), float(price["high"])) if price else None,
            aliases=tuple(raw["aliases"]),
            as_of=str(raw["as_of"]),
            sources=raw["sources"],
            unverified=frozenset(raw["unverified"]),
            note=raw["note"],
            layer_overhead_s=float(raw.get("layer_overhead_us", 0)) * 1e-6,
        )
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise KvctlError(f"{path.name} is not a hardware profile: {error}", hint="See profiles/README.md.") from error


def all_hardware() -> list[HardwareProfile]:
    """Every bundled profile, by id."""
    return [load_hardware(path) for path in sorted((profiles_folder() / "hardware").glob("*.yaml"))]


def find_hardware(name: str) -> HardwareProfile:
    """The profile that a person or a driver means: an id, an alias, a product name, or a YAML file.

    Raises:
        ConfigError: no such profile.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"--gpu names {name}, which is not a file", hint="Give a profile or its name.")
        return load_hardware(path)
    wanted = _plain(name)
    direct = profiles_folder() / "hardware" / f"{wanted}.yaml"
    if wanted and direct.is_file():
        return load_hardware(direct)
    profiles = all_hardware()
    for profile in profiles:
        if wanted in {_plain(profile.id), _plain(profile.name), *map(_plain, profile.aliases)}:
            return profile
    close = [p.id for p in profiles if wanted and (wanted in _plain(p.id) or _plain(p.id) in wanted)]
    listed = close or [p.id for p in profiles]
    shown = ", ".join(listed[:_GUESSED_NAMES]) + (", ..." if len(listed) > _GUESSED_NAMES else "")
    raise ConfigError(f"--gpu is {name!r}: no such profile", hint=f"Choose one of {shown}.")


def detect_hardware() -> tuple[HardwareProfile, int, int]:
    """The GPU in this machine through NVML: profile, its real memory in bytes, and how many there are.

    Raises:
        ConfigError: no NVML, no GPU, or a GPU without a profile.
    """
    try:
        import pynvml
    except ImportError as error:
        raise ConfigError(
            "--gpu auto needs the NVML bindings", hint='pip install "kvctl[gpu]", or name the GPU: --gpu h100-sxm.'
        ) from error
    try:
        pynvml.nvmlInit()
        try:
            count = int(pynvml.nvmlDeviceGetCount())
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            product: Any = pynvml.nvmlDeviceGetName(handle)
            total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ConfigError(f"--gpu auto found no GPU: {error}", hint="Name one: --gpu h100-sxm.") from error
    name = product.decode() if isinstance(product, bytes) else str(product)
    return find_hardware(name), total, count
