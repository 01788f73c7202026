"""WeightSize: parameters and bytes of a model's weights, on all GPUs and on the fullest one.

Knows parts (from the config) or tensors (from safetensors headers, see safetensors_header.py), number formats and
parallelism. Bytes from files are exact; bytes from a config are exact for the parameters counted and leave out
what a config does not describe. Floor 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvctl.errors import ModelBroken
from kvctl.model.layer_shape import LayerKind
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_formats import WeightFormat
from kvctl.model.weight_parts import weight_parts
from kvctl.model.weight_traits import WeightPart

# MXFP4 kernels want rows and columns in multiples of this: gpt-oss' 2880 become 3072. Pinned by its logs (65.97 GiB).
MXFP4_MULTIPLE = 256
VOCAB_PADDING_ROWS = 64  # engines round a split vocabulary up to this. Source: vLLM's VocabParallelEmbedding


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a model is spread: ranks of tensor and pipeline parallelism, and whether experts are split by expert."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Parameters and bytes; `bytes_per_gpu` is the fullest GPU's share. `active_parameters`: used for one token."""

    num_parameters: int
    active_parameters: int
    total_bytes: int
    bytes_per_gpu: int
    source: str
    format_name: str
    read_bytes_per_gpu: int  # read by one decode step of one sequence (experts not chosen left out)
    notes: tuple[str, ...] = ()


def computed_weight_size(shape: ModelShape, fmt: WeightFormat, parallel: Parallelism) -> WeightSize | None:
    """Count and price the weights from the config; None when the family's matrices are not known here.

    Raises:
        ModelBroken: the config's numbers contradict each other.
    """
    try:
        parts = weight_parts(shape)
    except ModelBroken:
        if not shape.view.fields.get("_incomplete") and not _is_shortened(shape):
            raise
        parts = None
    if parts is None:
        return None
    notes = []
    vision = _vision_parameters(shape)
    if vision:
        parts = (*parts, WeightPart("vision tower (estimated)", vision, "whole", False))
        notes.append(f"vision tower estimated at {vision / 1e9:.2f} B parameters")
    per_token = _expert_share(shape)
    total = sum(p.num_parameters for p in parts)
    active = sum(int(p.num_parameters * (per_token if p.share == "experts" else 1)) for p in parts)
    last_stage = _stages(shape.num_layers, parallel.pipeline)
    per_gpu, read = Fraction(0), Fraction(0)
    for part in parts:
        if part.layer_index is not None and part.layer_index not in last_stage:
            continue
        bits = _bits(part, fmt)
        mine = _on_one_gpu(part, shape, parallel) * bits
        if fmt.name == "mxfp4" and part.name == "experts":
            mine *= _mxfp4_padding(shape)
        per_gpu += mine
        if part.name not in ("embedding", "per-layer embedding"):
            read += mine * (per_token if part.share == "experts" else 1)
    tied = next((p for p in parts if p.name == "embedding"), None)
    if tied is not None and not any(p.name == "lm_head" for p in parts):
        read += _on_one_gpu(tied, shape, parallel) * _bits(tied, fmt)
    return WeightSize(
        num_parameters=total,
        active_parameters=active,
        total_bytes=int(sum(p.num_parameters * _bits(p, fmt) for p in parts) / 8),
        bytes_per_gpu=int(per_gpu / 8),
        source="computed from config.json",
        format_name=fmt.name,
        read_bytes_per_gpu=int(read / 8),
        notes=tuple(notes),
    )


def measured_weight_size(
    shape: ModelShape, total_bytes: int, num_parameters: int, parallel: Parallelism, fmt: WeightFormat, source: str
) -> WeightSize:
    """Exact total bytes from files; the share of one GPU follows the parts where they are known.

    `num_parameters` 0: the files do not tell (packed formats); the config's count is used.
    """
    computed = computed_weight_size(shape, fmt, parallel)
    num_parameters = num_parameters or (computed.num_parameters if computed else 0)
    if computed is None or not computed.total_bytes:
        share, read, active = Fraction(1, parallel.gpus), Fraction(1, parallel.gpus), num_parameters
    else:
        share = Fraction(computed.bytes_per_gpu, computed.total_bytes)
        read = Fraction(computed.read_bytes_per_gpu, computed.total_bytes)
        active = int(num_parameters * Fraction(computed.active_parameters, computed.num_parameters))
    return WeightSize(
        num_parameters=num_parameters,
        active_parameters=active,
        total_bytes=total_bytes,
        bytes_per_gpu=int(total_bytes * share),
        source=source,
        format_name=fmt.name,
        read_bytes_per_gpu=int(total_bytes * read),
    )


def _is_shortened(shape: ModelShape) -> bool:
    return shape.view.get("intermediate_size") is None or shape.family in ("nemotron_h", "falcon_h1")


def _bits(part: WeightPart, fmt: WeightFormat) -> Fraction:
    if fmt.quantizes_embedding and part.share == "vocab":
        return fmt.linear_bits
    if not part.is_linear or (fmt.only_experts and part.share != "experts"):
        return fmt.other_bits
    return fmt.expert_bits if fmt.expert_bits is not None and part.share == "experts" else fmt.linear_bits


def _expert_share(shape: ModelShape) -> Fraction:
    view = shape.view
    count, chosen = view.get("num_experts"), view.get("num_experts_per_tok")
    if isinstance(count, int) and isinstance(chosen, int) and count > 0:
        return min(Fraction(1), Fraction(chosen, count))
    return Fraction(1)


def _on_one_gpu(part: WeightPart, shape: ModelShape, parallel: Parallelism) -> Fraction:
    tensor = parallel.tensor
    if part.share == "whole" or tensor * parallel.data == 1:
        return Fraction(part.num_parameters)
    if part.share == "experts" and parallel.expert:
        return Fraction(part.num_parameters, tensor * parallel.data)
    if part.share == "kv":
        heads = next((x.num_kv_heads for x in shape.layers if x.num_kv_heads), tensor)
        return Fraction(part.num_parameters, min(tensor, heads))
    if part.share == "vocab" and shape.vocab_size:
        padded = -(-shape.vocab_size // VOCAB_PADDING_ROWS) * VOCAB_PADDING_ROWS
        return Fraction(part.num_parameters, tensor) * Fraction(padded, shape.vocab_size)
    return Fraction(part.num_parameters, tensor)


def _mxfp4_padding(shape: ModelShape) -> Fraction:
    """Gate and up (two thirds) pad their rows; down (one third) pads rows and columns."""
    width = shape.view.optional_int("moe_intermediate_size") or shape.view.optional_int("intermediate_size") or 1
    rows = Fraction(-(-width // MXFP4_MULTIPLE) * MXFP4_MULTIPLE, width)
    hidden = shape.hidden_size
    columns = Fraction(-(-hidden // MXFP4_MULTIPLE) * MXFP4_MULTIPLE, hidden)
    return Fraction(2, 3) * rows + Fraction(1, 3) * rows * columns


def _stages(num_layers: int, pipeline: int) -> frozenset[int]:
    """Layers of the largest pipeline stage, taken with both embeddings: the fullest GPU, slightly overstated."""
    return frozenset(range(-(-num_layers // pipeline)))


def _vision_parameters(shape: ModelShape) -> int:
    """A ViT's matrices from vision_config: attention, MLP, patch embedding and the projection into the text width."""
    vision = shape.view.outer.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0
    depth = _int(vision, "depth", "num_hidden_layers", "num_layers")
    width = _int(vision, "hidden_size", "width", "embed_dim")
    inner = _int(vision, "intermediate_size") or 4 * width
    if not depth or not width:
        return 0
    patch = _int(vision, "patch_size") or 14
    merged = width * (_int(vision, "spatial_merge_size") or 2) ** 2
    return (
        depth * (4 * width * width + 2 * width * inner + 9 * width + inner)
        + 3 * patch * patch * width
        + merged * (merged + shape.hidden_size)
    )


def _int(mapping: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = mapping.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**7:
            return value
    return 0


def layers_with_experts(shape: ModelShape) -> bool:
    """Whether the model is a mixture of experts."""
    return bool(shape.view.get("num_experts")) and any(x.kind is not LayerKind.NONE for x in shape.layers)
