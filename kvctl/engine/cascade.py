"""When a prefix that many requests share is read once for all of them, and how that prefix is found.

Knows block tables and bytes; no kernel and no model. A cascade costs another launch or two in each layer and saves
the reads of all requests but one over the prefix. Floor 2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvctl.errors import ConfigError
from kvctl.model.hardware import find_hardware
from kvctl.sizing.kernel_time import LAUNCH_S

# What a cascade must win back in a layer: two launches, and as much again for a prefix that is read by fewer programs
# and for partial results. Predicted, never measured: scripts/gpu_check.py measures both ways.
COST_S = 4 * LAUNCH_S
_USUAL_BYTES_PER_S = 3e12  # of a device that no profile names


@dataclass(frozen=True, slots=True)
class CascadeRule:
    """What is needed to decide. `groups`: the KV cache groups whose layers have no window."""

    groups: frozenset[int]
    token_bytes: int  # keys and values of one token in one layer
    bytes_per_s: float  # of the device's memory

    def pays(self, num_requests: int, shared_tokens: int) -> bool:
        """Whether the reads that are saved take longer than a cascade costs."""
        saved_bytes = (num_requests - 1) * shared_tokens * self.token_bytes
        return saved_bytes > COST_S * self.bytes_per_s


def device_bytes_per_s(device_name: str) -> float:
    """Memory bandwidth of a device by the name its driver gives it."""
    try:
        return find_hardware(device_name).bandwidth_gb_s * 1e9
    except ConfigError:
        return _USUAL_BYTES_PER_S


def num_shared_blocks(tables: NDArray[np.int32], shortest_tokens: int, block_size: int) -> int:
    """How many leading blocks all rows of `tables` [R, blocks] have in common, whole within every sequence.

    A null block (a window has passed) ends it.
    """
    full = shortest_tokens // block_size
    if not full or (tables[:, 0] != tables[0, 0]).any():  # mostly so, and cheaply told
        return 0
    same = (tables[:, :full] == tables[0, :full]).all(axis=0) & (tables[0, :full] != 0)
    return full if same.all() else int(same.argmin())
