"""Headers of weight files: exact sums, and files that lie."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors.numpy

from kvctl.errors import ModelBroken, ModelNotSupported
from kvctl.model.gguf_header import read_gguf
from kvctl.model.model_shape import ModelShape
from kvctl.model.safetensors_header import TensorInfo, file_tensors, loaded_tensors, parse_header


def test_sizes_are_those_of_a_file_that_safetensors_wrote(tmp_path: Path) -> None:
    arrays = {"a.weight": np.zeros((7, 5), np.float32), "b": np.zeros((3,), np.float16), "c": np.zeros((9,), np.uint8)}
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path)
    found = {t.name: t for t in file_tensors(path)}
    assert {name: t.num_bytes for name, t in found.items()} == {name: a.nbytes for name, a in arrays.items()}
    assert sum(t.num_elements for t in found.values()) == 35 + 3 + 9


def write(path: Path, length: int, body: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", length) + body)
    return path


@pytest.mark.parametrize(
    ("length", "body"),
    [
        (2**60, b"{}"),
        (200_000_000, b"{}"),
        (100, b"{}"),
        (0, b""),
        (2, b"[]"),
        (4, b"nope"),
        (2, b"{"),
    ],
)
def test_a_lying_or_damaged_header_is_one_clear_line(tmp_path: Path, length: int, body: bytes) -> None:
    with pytest.raises(ModelBroken) as caught:
        file_tensors(write(tmp_path / "m.safetensors", length, body))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("size", range(9))
def test_a_file_too_short_is_told(tmp_path: Path, size: int) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"\x02" + b"\0" * size if size else b"")
    with pytest.raises(ModelBroken):
        file_tensors(path)


def test_a_cut_download_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.zeros((1000,), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelBroken, match="promises"):
        file_tensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
        7,
    ],
)
def test_entries_that_contradict_themselves_are_refused(entry: object) -> None:
    with pytest.raises(ModelBroken):
        parse_header(json.dumps({"a": entry}).encode(), "x")


def tensor(name: str) -> TensorInfo:
    return TensorInfo(name, "BF16", 10, 20)


def test_draft_layers_and_the_second_copy_of_a_tied_table_are_not_loaded() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.a", "model.layers.61.a", "mtp.layers.0.b"]
    kept = [t.name for t in loaded_tensors(map(tensor, names), num_layers=61, tied=True)]
    assert kept == ["model.embed_tokens.weight", "model.layers.0.a"]


def make_gguf(path: Path, arch: str = "llama") -> int:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_context_length(4096)
    writer.add_token_list([f"t{i}" for i in range(5000)])
    arrays = {
        "token_embd.weight": np.ones((5000, 64), np.float16),
        "blk.0.attn_q.weight": np.ones((64, 64), np.float32),
    }
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sum(a.nbytes for a in arrays.values())


def test_a_gguf_file_tells_its_shape_and_exact_bytes(tmp_path: Path) -> None:
    stored = make_gguf(tmp_path / "m.gguf")
    facts = read_gguf(tmp_path / "m.gguf")
    shape = ModelShape.from_config(facts.config)
    assert facts.weight_bytes == stored
    assert facts.num_parameters == 5000 * 64 + 64 * 64
    assert (shape.num_layers, shape.layers[0].num_kv_heads, shape.layers[0].key_dim) == (2, 2, 16)
    assert (shape.vocab_size, shape.max_model_len) == (5000, 4096)
    assert facts.config["tie_word_embeddings"] is True


def test_an_unknown_gguf_architecture_is_not_guessed(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf", arch="zork")
    with pytest.raises(ModelNotSupported, match="zork"):
        read_gguf(tmp_path / "m.gguf")


def test_every_cut_of_a_gguf_header_is_told(tmp_path: Path) -> None:
    make_gguf(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 4, 11, 24, 100, 1000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelBroken):
            read_gguf(tmp_path / "cut.gguf")


def test_a_gguf_array_longer_than_the_file_is_told(tmp_path: Path) -> None:
    body = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**50)
    (tmp_path / "m.gguf").write_bytes(body)
    with pytest.raises(ModelBroken, match="array"):
        read_gguf(tmp_path / "m.gguf")
