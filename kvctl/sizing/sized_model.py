"""From a name to a model that can be sized: finds its facts, reads its shape, adds up its weight files. Floor 1."""

from pathlib import Path

from kvctl.model.dtypes import safetensors_bits
from kvctl.model.lookup import FoundModel, find_model
from kvctl.model.model_shape import ModelShape
from kvctl.model.safetensors_header import TensorInfo, loaded_tensors
from kvctl.sizing.request import SizedModel, WeightFiles


def load_model(name: str, *, refresh: bool = False) -> SizedModel:
    """Find and read a model.

    Raises:
        ModelNotFound, ModelBroken, ModelNotSupported, ConfigError: see `find_model` and `ModelShape.from_config`.
    """
    found = find_model(name, refresh=refresh)
    shape = ModelShape.from_config(found.config)
    return SizedModel(found.id, shape, found.source, _files(found, shape), _servable_name(name))


def _servable_name(name: str) -> str:
    """The model as `kvctl serve` and `vllm serve` take it: a folder where its config.json was given."""
    if name == "-":
        return "MODEL"
    return str(Path(name).parent) if Path(name).suffix == ".json" else name


def _files(found: FoundModel, shape: ModelShape) -> WeightFiles | None:
    if found.tensors:
        tied = bool(shape.view.fields.get("tie_word_embeddings"))
        kept = loaded_tensors(found.tensors, num_layers=shape.num_layers, tied=tied)
        total = sum(t.num_bytes for t in kept)
        return WeightFiles(total, _count(kept), f"safetensors headers ({len(kept):,} tensors)")
    if found.total_bytes:
        is_gguf = bool(found.num_parameters)
        source = "GGUF header" if is_gguf else "safetensors index"
        return WeightFiles(found.total_bytes, found.num_parameters or 0, source, is_gguf)
    return None


def _count(tensors: list[TensorInfo]) -> int:
    """Parameters, by elements; packed 4-bit words (int32, uint8) count as 0 here: only the config knows them."""
    packed = any(t.dtype in ("I32", "U8", "F8_E8M0") for t in tensors)
    return 0 if packed else sum(t.num_elements for t in tensors if safetensors_bits(t.dtype))
