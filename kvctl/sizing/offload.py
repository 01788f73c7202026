"""KV cache in host memory or on NVMe: what a prefix takes there, and whether loading it beats computing it again.

Knows links and the speed model; no connector. Floor 1.
"""

from dataclasses import dataclass

from kvctl.model.kv_cache_spec import request_bytes
from kvctl.sizing.speed import SpeedModel

NVME_GB_S = 6.0  # sequential reads of one PCIe 4 x4 drive. Source: vendor figures of 7 GB/s, 85 % reached
LOAD_OVERHEAD_S = 0.002  # look-up, block copies and a scheduler step


@dataclass(frozen=True, slots=True)
class OffloadTier:
    """One tier: the time to load `prefix_tokens`, and from where on that beats recomputing."""

    name: str
    gb_s: float
    load_s: float
    break_even_tokens: int | None  # None: recomputing is never slower, up to 1 M tokens


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """A prefix outside the GPU."""

    prefix_tokens: int
    prefix_bytes: int  # on all GPUs of a replica together
    recompute_s: float
    tiers: tuple[OffloadTier, ...]


def offload_report(model: SpeedModel, prefix_tokens: int) -> OffloadReport | None:
    """Compare loading a prefix with computing it; None when the cache's size is not known."""
    links = [("NVMe", NVME_GB_S)]
    if model.hardware.host_link_gb_s and not model.hardware.is_cpu:
        links.insert(0, ("host memory", model.hardware.host_link_gb_s))
    per_gpu = request_bytes(model.specs, prefix_tokens)
    if per_gpu is None:
        return None
    tiers = []
    for name, rate in links:
        tiers.append(OffloadTier(name, rate, _load_s(model, prefix_tokens, rate), _break_even(model, rate)))
    return OffloadReport(
        prefix_tokens, per_gpu * model.parallel.tensor, model.prefill_s(prefix_tokens).value, tuple(tiers)
    )


def _load_s(model: SpeedModel, tokens: int, gb_s: float) -> float:
    """Every GPU loads its own share over its own link."""
    return LOAD_OVERHEAD_S + (request_bytes(model.specs, tokens) or 0) / (gb_s * 1e9)


def _break_even(model: SpeedModel, gb_s: float) -> int | None:
    low, high = 1, 1 << 20
    if _load_s(model, high, gb_s) >= model.prefill_s(high).value:
        return None
    while low < high:  # both grow with length; recomputing grows faster
        middle = (low + high) // 2
        if _load_s(model, middle, gb_s) < model.prefill_s(middle).value:
            high = middle
        else:
            low = middle + 1
    return low
