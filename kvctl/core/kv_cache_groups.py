"""Which layers share a block table: one group per attention kind, all groups drawing blocks from one pool.

A block of the pool holds `block_size` tokens of every layer of ONE group. So that one block fits any group,
all groups have the same number of layers (`layers_per_block`); the last group of a kind may be padded.
A model whose layers are all alike has one group and a block spans all its layers.

Knows layer numbers and windows only: no bytes, no tensors. Floor 0.
Source of the rule: vLLM's hybrid KV cache manager (group size = the smaller kind's layer count, or the larger
one when that is under 1.5 times the smaller); checked against printed server logs in `tests/sizing`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one block table. `window_tokens` is None for full attention."""

    layer_indices: tuple[int, ...]
    window_tokens: int | None = None


def layers_per_block(counts: Sequence[int]) -> int:
    """How many layers one block spans, given the number of layers of each kind.

    Raises:
        ValueError: no layers at all.
    """
    smallest, largest = min(counts), max(counts)
    return largest if largest < 1.5 * smallest else smallest


def group_layers(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """Group the layers of a model by their window (None: full attention), full attention first.

    Layers of one kind are dealt round-robin (`i::n`) over as many groups as the kind needs.

    Raises:
        ValueError: no layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for index, window in enumerate(windows):
        kinds.setdefault(window, []).append(index)
    if not kinds:
        raise ValueError("a model without layers has no KV cache")
    size = layers_per_block([len(layers) for layers in kinds.values()])
    groups: list[KVCacheGroup] = []
    for window in sorted(kinds, key=lambda w: (w is not None, w or 0)):
        layers = kinds[window]
        n_groups = -(-len(layers) // size)
        groups += [KVCacheGroup(tuple(layers[i::n_groups]), window) for i in range(n_groups)]
    return tuple(groups)
