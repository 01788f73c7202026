"""PoolGroup: layers that share one block table, as capacity.py counts them. Data only. Floor 1."""

from dataclasses import dataclass

from kvctl.model.layer_shape import LayerKind


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Layers with one block table. `page_bytes` is what one block costs for all its layers on one GPU."""

    kind: LayerKind
    layer_indices: tuple[int, ...]
    block_tokens: int  # 0: recurrent, a block holds a state
    page_bytes: int
    window_tokens: int | None = None
    source_tokens: int | None = None
    padding_layers: int = 0
    mixer: str = ""  # of a recurrent group
    share_tokens: int = (
        0  # of a recurrent group: tokens of an attention block, beside each of which a state may be kept
    )
