"""Checkpoint tensors -> packed tensors, or random ones of the same shapes.

Knows names, shapes and dtypes, no model code. Every header is read and every expected tensor checked BEFORE anything
is loaded, so that a broken folder fails at once and names its file. Floor 2.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from kvctl.engine.json_file import read_json_object
from kvctl.engine.models.decoder_config import DecoderConfig
from kvctl.engine.models.weight_layout import PackedTensor, TensorPart, all_tensors
from kvctl.engine.safetensors_file import READABLE_DTYPES, SafetensorsFile
from kvctl.errors import ModelBroken, ModelNotSupported

_INDEX = "model.safetensors.index.json"
_COPY_BYTES = 32 << 20  # copied between two releases of mapped pages: bounds what the map adds to our memory
# Recomputed, or read where a float8 KV cache is asked for (see kv_scales).
_NOT_WEIGHTS = ("rotary_emb.inv_freq", "self_attn.k_scale", "self_attn.v_scale", "k_proj.k_scale", "v_proj.v_scale")
_AGAIN = "Download the model again."
# The text part of a model with vision has two spellings, before and after transformers 4.52; read the first.
_OTHER_PREFIX, _PREFIX = "model.language_model.", "language_model.model."


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> the file that holds it."""
    index_path = folder / _INDEX
    if index_path.exists():
        weight_map = read_json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelBroken(f"{index_path}: 'weight_map' is not a map of names to files", hint=_AGAIN)
        files: dict[str, SafetensorsFile] = {}
        for file_name in sorted(set(weight_map.values())):
            if not (folder / file_name).exists():
                count = sum(1 for name in weight_map.values() if name == file_name)
                raise ModelBroken(
                    f"{folder / file_name}: the file is missing, {_INDEX} expects {count} tensors in it",
                    hint="Download that file, or the whole model again.",
                )
            files[file_name] = SafetensorsFile(folder / file_name)
        for name, file_name in weight_map.items():
            if name not in files[file_name].entries:
                raise ModelBroken(
                    f"{folder / file_name}: tensor {name!r} is not in it, though {_INDEX} says so", hint=_AGAIN
                )
        return {name: files[file_name] for name, file_name in weight_map.items()}
    # Beside it may lie the same weights under other names (consolidated.safetensors), or an adapter's.
    paths = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise ModelBroken(
            f"{folder}: there is no .safetensors file" + (f", only {', '.join(others[:3])}" if others else ""),
            hint="Use a version of the model with safetensors weights, or --load-format dummy for random ones.",
        )
    return {name: file for file in map(SafetensorsFile, paths) for name in file.entries}


def _check_unknown(files: Iterable[str], config: DecoderConfig) -> None:
    """A tensor of a served layer that nobody reads would mean wrong answers without a word."""
    expected = {part.name for packed in all_tensors(config) for part in packed.parts}
    prefix = f"{config.name_prefix}layers."
    for name in files:
        if name in expected or not name.startswith(prefix) or name.endswith(_NOT_WEIGHTS):
            continue
        index = name.removeprefix(prefix).partition(".")[0]
        if index.isdecimal() and int(index) < config.num_layers:
            raise ModelNotSupported(
                f"the weights hold {name!r}, which a plain {config.architecture} does not have",
                hint="This is a variant of the architecture that is not supported.",
            )


def _held_dtype(packed: PackedTensor, dtype: torch.dtype) -> torch.dtype:
    """Norms are held in float32, a few kilobytes: kernels widen them anyway, and 1 + w does not fit bfloat16."""
    return torch.float32 if packed.is_norm else dtype


class CheckpointWeights:
    """Packed tensors from the .safetensors files of a folder.

    Raises:
        ModelBroken: a file or a tensor is missing, cut short, or of another shape than config.json means.
        ModelNotSupported: the layers hold tensors that this decoder does not know.
    """

    def __init__(self, folder: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._files: dict[str, SafetensorsFile] = {}
        self._stored_names: dict[str, str] = {}  # the name we ask for -> the name in the file
        for stored, file in _open_files(folder).items():
            name = _PREFIX + stored.removeprefix(_OTHER_PREFIX) if stored.startswith(_OTHER_PREFIX) else stored
            self._files[name] = file
            self._stored_names[name] = stored
        self._dtype = dtype
        self._device = device
        self._norm_plus_one = config.norm_plus_one
        for packed in all_tensors(config):
            for part in packed.parts:
                self._check(part, folder)
        _check_unknown(self._files, config)

    def _check(self, part: TensorPart, folder: Path) -> None:
        file = self._files.get(part.name)
        if file is None:
            raise ModelBroken(f"{folder}: tensor {part.name!r} is in none of the weight files", hint=_AGAIN)
        stored = self._stored_names[part.name]
        entry = file.entries[stored]
        if entry.dtype is None:
            raise ModelBroken(
                f"{file.path}: tensor {stored!r} has the dtype {entry.dtype_name}, which cannot be served",
                hint=f"Use a version of the model saved as one of {', '.join(READABLE_DTYPES)}.",
            )
        found = entry.shape
        if found != part.shape:
            raise ModelBroken(
                f"{file.path}: tensor {stored!r} has shape {list(found)}, config.json means {list(part.shape)}",
                hint="config.json and the weights belong to different models: download both again.",
            )

    def load(self, packed: PackedTensor) -> Tensor:
        """Copy the parts from the map into one new tensor, a few megabytes at a time."""
        folded = packed.is_norm and self._norm_plus_one
        target = torch.empty(packed.shape, dtype=_held_dtype(packed, self._dtype), device=self._device)
        row = 0
        for part in packed.parts:
            file, stored = self._files[part.name], self._stored_names[part.name]
            num_rows = part.shape[0]
            entry = file.entries[stored]
            row_bytes = max(1, (entry.end - entry.start) // max(1, num_rows))
            step = max(1, _COPY_BYTES // row_bytes)
            for first in range(0, num_rows, step):
                last = min(first + step, num_rows)
                target[row + first : row + last].copy_(file.rows(stored, first, last))
                file.release(stored)
            row += num_rows
        return target.add_(1.0) if folded else target

    def find(self, name: str) -> Tensor | None:
        """A small tensor that a checkpoint may have beside its weights; None if this one does not."""
        file = self._files.get(name)
        if file is None:
            return None
        stored = self._stored_names[name]
        entry = file.entries[stored]
        if entry.dtype is None:
            raise ModelBroken(f"{file.path}: tensor {stored!r} has the dtype {entry.dtype_name}", hint=_AGAIN)
        return file.rows(stored, 0, entry.shape[0] if entry.shape else 1).clone()


class DummyWeights:
    """Random weights of the right shapes and of sane sizes, the same for the same seed. For tests and speed trials."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(seed)

    def find(self, name: str) -> Tensor | None:
        """Nothing beside the weights."""
        return None

    def load(self, packed: PackedTensor) -> Tensor:
        """Norms are one; the rest is uniform with the standard deviation 0.02 that models are initialised with."""
        if packed.is_norm:
            return torch.ones(packed.shape, dtype=torch.float32, device=self._device)
        bound = 0.02 * 3**0.5
        tensor = torch.empty(packed.shape, dtype=self._dtype, device=self._device)
        return tensor.uniform_(-bound, bound, generator=self._generator)
