"""Turn a GGUF file into an ordinary Hugging Face model folder: bfloat16 weights, config, tokenizer, chat template.

Works tensor by tensor and in pieces of some megabytes, so that a model of any size needs little memory, and needs
neither torch nor transformers. Does not know where files come from or where folders are kept. Floor 2.

Source of the output format: the safetensors specification (8 bytes of length, a JSON header, the tensors' bytes).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvctl.engine.gguf_config import TensorPlan, build_config, plan_tensors
from kvctl.engine.gguf_file import GgufFile, GgufTensor
from kvctl.engine.gguf_tokenizer import write_tokenizer
from kvctl.engine.progress import Report, silent
from kvctl.errors import KvctlError, ModelBroken, ModelNotSupported

CONVERTER_VERSION: Final = 1  # raise it when the same file gives another folder: cached folders are built again
_VALUES_PER_PIECE: Final = 1 << 22  # 16 MiB as float32
_BF16_BYTES: Final = 2


def convert_gguf(gguf_path: Path, folder: Path, report: Report = silent) -> None:
    """Write the model in `gguf_path` into the existing, empty `folder`.

    Raises:
        ModelNotFound: no such file.
        ModelBroken: the file is damaged or contradicts itself.
        ModelNotSupported: an architecture, tokenizer or quantisation that kvctl cannot serve.
        OSError: the folder cannot be written to; what was written is left for the caller to remove.
    """
    with _told_as_broken(gguf_path), GgufFile(gguf_path) as file:
        config = build_config(file)
        num_tokens = len(file.metadata.get("tokenizer.ggml.tokens") or ())
        if num_tokens > config["vocab_size"]:
            raise ModelBroken(
                f"{gguf_path}: {num_tokens:,} tokens, but the embedding has {config['vocab_size']:,} rows",
                hint="Fetch the file again, or convert the model again.",
            )
        plans = plan_tensors(file, config)
        _check_types(file, plans)
        ends = write_tokenizer(file, folder, max_length=config["max_position_embeddings"])
        if ends:
            config["eos_token_id"] = ends
        _write_weights(file, plans, folder / "model.safetensors", report)
        # The config is written last: a folder without one is no model for anybody.
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _told_as_broken(gguf_path: Path) -> Iterator[None]:
    """Metadata of another type than the format's (a number where a list belongs) may break anything that reads it."""
    try:
        yield
    except (KvctlError, OSError, MemoryError):
        raise
    except Exception as error:
        raise ModelBroken(
            f"{gguf_path}: its metadata cannot be understood: {type(error).__name__}: {error}",
            hint="Fetch the file again, or convert the model again.",
        ) from error


def converted_size_bytes(gguf_path: Path) -> int:
    """Return how many bytes the weights will take once converted."""
    with _told_as_broken(gguf_path), GgufFile(gguf_path) as file:
        return sum(_num_values(plan.shape) * _BF16_BYTES for plan in plan_tensors(file, build_config(file)))


def _num_values(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _check_types(file: GgufFile, plans: list[TensorPlan]) -> None:
    """Dequantise one block of each type that occurs, so that an unknown one is told before anything is written."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    first_of = {file.tensors[plan.source].type_name: plan.source for plan in reversed(plans)}
    for type_name, name in first_of.items():
        quant_type = GGMLQuantizationType[type_name]
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[quant_type][1]), np.uint8), quant_type)
        except NotImplementedError:
            raise ModelNotSupported(
                f"{file.path}: tensor {name} has the quantisation type {type_name}, which cannot be read here",
                hint="Use a file of the usual types: Q4_0 to Q8_0, Q2_K to Q6_K, IQ, F16, BF16, F32.",
            ) from None


def _write_weights(file: GgufFile, plans: list[TensorPlan], path: Path, report: Report) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for plan in plans:
        end = position + _num_values(plan.shape) * _BF16_BYTES
        header[plan.target] = {"dtype": "BF16", "shape": list(plan.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    what = "Converting to bfloat16"
    report(what, 0.0)
    written = 0
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for plan in plans:
            for piece in _bf16_pieces(file, file.tensors[plan.source], plan):
                out.write(piece.data)
                written += piece.nbytes
                report(what, written / position)


def _bf16_pieces(file: GgufFile, tensor: GgufTensor, plan: TensorPlan) -> Iterator[NDArray[np.uint16]]:
    """Yield the tensor's rows from first to last as bfloat16 bit patterns."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    quant_type = GGMLQuantizationType[tensor.type_name]
    if plan.permuted_heads:
        yield _to_bf16(dequantize(_unpermuted_rows(file, tensor, plan.permuted_heads), quant_type))
        return
    rows_per_piece = max(1, _VALUES_PER_PIECE // tensor.shape[-1])
    for start in range(0, tensor.num_rows, rows_per_piece):
        values = dequantize(file.rows(tensor, start, min(start + rows_per_piece, tensor.num_rows)), quant_type)
        yield _to_bf16(values - np.float32(1) if plan.subtract_one else values)


def _unpermuted_rows(file: GgufFile, tensor: GgufTensor, num_heads: int) -> NDArray[np.uint8]:
    """Undo llama.cpp's order of query and key rows: per head, (pair, half) there is (half, pair) here.

    Only rows move, so the raw quantised rows can be moved. A bias is one row of values, which are moved instead.
    """
    raw = file.rows(tensor)
    if len(tensor.shape) == 1:
        raw = raw.reshape(tensor.shape[0], -1)  # one value a row; biases are never block-quantised
    per_head = raw.reshape(num_heads, raw.shape[0] // num_heads // 2, 2, raw.shape[1])
    return np.ascontiguousarray(per_head.swapaxes(1, 2)).reshape(raw.shape)


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bfloat16 bit patterns, to nearest and ties to even, as torch does; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = 0x7FC0
    return rounded
