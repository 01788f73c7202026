"""How much memory the KV cache may take on this device, and the lines that tell how that was found.

Knows no request. On a CPU a share of what is free now; on CUDA vLLM's rule: utilization x total memory, less
weights, the activations of the largest step and what others hold. Floor 2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvctl.engine.config import DeviceConfig
from kvctl.engine.device import available_host_bytes
from kvctl.errors import OutOfMemory
from kvctl.units import GIB, format_bytes

CPU_SHARE = 0.4  # of the free memory: leaves room for activations, the API process and the rest of the machine
CPU_LIMIT_BYTES = 4 * GIB
_UNKNOWN_HOST_BYTES = 1 * GIB  # where the system does not tell what is free


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for the KV cache; `ceiling_bytes` is what there is at all (None: unknown); lines for the log."""

    kv_cache_bytes: int
    ceiling_bytes: int | None
    lines: tuple[str, ...]


def cpu_budget(config: DeviceConfig, weight_bytes: int) -> MemoryBudget:
    """Measure the free memory now, with the weights loaded."""
    free = available_host_bytes()
    free_text = "unknown" if free is None else format_bytes(free)
    head = f"Memory: weights {format_bytes(weight_bytes)}, free now {free_text}"
    if config.kv_cache_memory_bytes is not None:
        asked = config.kv_cache_memory_bytes
        return MemoryBudget(asked, free, (f"{head}, KV cache {format_bytes(asked)} (--kv-cache-memory-bytes)",))
    share = _UNKNOWN_HOST_BYTES if free is None else min(CPU_LIMIT_BYTES, int(free * CPU_SHARE))
    rule = f"at most {CPU_SHARE:.0%} of it and {format_bytes(CPU_LIMIT_BYTES)}; --kv-cache-memory-bytes sets it"
    return MemoryBudget(share, free, (f"{head}, KV cache up to {format_bytes(share)} ({rule})",))


def cuda_budget(
    config: DeviceConfig,
    weight_bytes: int,
    device: torch.device,
    run_largest_step: Callable[[], None],
    *,
    graph_bytes: int = 0,
) -> MemoryBudget:
    """Measure by running the largest step once on a device that holds the weights already.

    `graph_bytes`: what graphs, captured once the cache is there, are expected to take.

    Raises:
        OutOfMemory: nothing of the share that was asked for is left for the cache.
    """
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    activation_bytes = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    held_by_torch = torch.cuda.memory_reserved(device)
    others_bytes = total - free - held_by_torch  # driver, libraries and other processes
    asked = int(total * config.gpu_memory_utilization)
    left = asked - held_by_torch - activation_bytes - others_bytes - graph_bytes
    head = (
        f"Memory of {torch.cuda.get_device_name(device)}: {format_bytes(total)} x {config.gpu_memory_utilization:g} = "
        f"{format_bytes(asked)}, less weights {format_bytes(weight_bytes)}, peak activation "
        f"{format_bytes(activation_bytes)}, decode graphs {format_bytes(graph_bytes)} (expected), outside torch "
        f"{format_bytes(others_bytes)}"
    )
    ceiling = free - activation_bytes - graph_bytes
    if config.kv_cache_memory_bytes is not None:
        left = config.kv_cache_memory_bytes
        return MemoryBudget(left, ceiling, (f"{head}; KV cache {format_bytes(left)} (--kv-cache-memory-bytes)",))
    if left <= 0 and config.num_gpu_blocks_override is None:
        raise OutOfMemory(
            f"no memory is left for the KV cache: {head}",
            hint="Raise --gpu-memory-utilization, lower --max-num-batched-tokens, or free the device.",
        )
    return MemoryBudget(max(left, 0), ceiling, (head, f"Available KV cache memory: {format_bytes(left)}"))
