"""Broken model folders fail at once, by name; sound ones load the same however they are cut into files."""

import json
import shutil
import struct
import time

import pytest
import safetensors.torch
import torch

from kvctl.engine.json_file import read_json_object
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.models.weight_layout import all_tensors
from kvctl.engine.weights import CheckpointWeights, DummyWeights
from kvctl.errors import KvctlError, ModelBroken, ModelNotSupported
from tests.support import engine_runs, tiny_models

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny Llama, to be broken."""
    _, source = tiny_folder(tiny_models.LLAMA)
    return shutil.copytree(source, tmp_path / "model")


@pytest.fixture
def sharded(tiny_folder, tmp_path):
    """The same in several files with an index."""
    model, _ = tiny_folder(tiny_models.LLAMA)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) >= 3
    return tmp_path / "sharded"


def rewrite(folder, change):
    """Load all tensors, let `change` alter the dict, save them again."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rename_dtype(folder, old, new):
    """Change a dtype's name in the header of the weights; the data stays."""
    raw = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = raw[8 : 8 + size].replace(f'"dtype":"{old}"'.encode(), f'"dtype":"{new}"'.encode())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + size :])


def write_header(folder, header):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


NAME = "model.layers.1.self_attn.k_proj.weight"
BREAKAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelBroken, "config.json"),
    "config is not JSON": (lambda f: (f / "config.json").write_text('{"a": 1,'), ModelBroken, "config.json"),
    "config is not UTF-8": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), ModelBroken, "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), ModelBroken, "config.json"),
    "unknown dtype in config": (lambda f: edit_config(f, dtype="float12"), ModelBroken, "float12"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ModelBroken, "safetensors"),
    "empty weights": (lambda f: truncate(f / "model.safetensors", 0), ModelBroken, "model.safetensors"),
    "cut within the header": (lambda f: truncate(f / "model.safetensors", 300), ModelBroken, "model.safetensors"),
    "cut within the data": (lambda f: truncate(f / "model.safetensors", 90_000), ModelBroken, "cut short"),
    "a Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        ModelBroken,
        "model.safetensors",
    ),
    "header is not JSON": (
        lambda f: (f / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"nope"),
        ModelBroken,
        "model.safetensors",
    ),
    "unknown dtype of a tensor": (lambda f: rename_dtype(f, "F32", "F12"), ModelBroken, "F12"),
    "a missing tensor": (lambda f: rewrite(f, lambda t: t.pop(NAME)), ModelBroken, NAME),
    "a wrong shape": (lambda f: rewrite(f, lambda t: t.update({NAME: t[NAME][:-1].clone()})), ModelBroken, NAME),
    "a config of another size": (lambda f: edit_config(f, intermediate_size=81), ModelBroken, "gate_proj"),
    "a bias nobody reads": (
        lambda f: rewrite(f, lambda t: t.update({NAME.replace("weight", "bias"): torch.zeros(16)})),
        ModelNotSupported,
        "k_proj.bias",
    ),
}


@pytest.mark.parametrize(
    "entry",
    [
        *("3", "null", "[]", "{}", '{"dtype": "F32", "shape": [1], "data_offsets": [0]}'),
        '{"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]}',
        '{"dtype": "F32", "shape": [true, 1], "data_offsets": [0, 4]}',
        '{"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}',
        '{"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 0]}',
        '{"dtype": "F32", "shape": [1180591620717411303424], "data_offsets": [0, 0]}',
        '{"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}',
        '{"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}',
        '{"dtype": "F32", "shape": [1], "data_offsets": [0, "4"]}',
        '{"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}',
        "[" * 200_000,
    ],
    ids=lambda entry: entry[:70],
)
def test_a_damaged_header_is_named(entry, folder):
    write_header(folder, b'{"lm_head.weight": ' + entry.encode() + b"}")
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        engine_runs.start(folder)


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda name: name.replace(" ", "-"))
def test_a_broken_folder_is_refused_with_the_name_of_what_is_wrong(breakage, folder):
    break_it, error, words = BREAKAGES[breakage]
    break_it(folder)
    with pytest.raises(error) as caught:
        engine_runs.start(folder)
    assert words in caught.value.message
    assert caught.value.hint
    assert len(str(caught.value).splitlines()) == 2


def test_a_missing_shard_is_named(sharded):
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelBroken) as caught:
        engine_runs.start(sharded)
    assert victim.name in caught.value.message


def test_an_index_that_promises_too_much_is_named(sharded):
    index_path = sharded / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    names = sorted(set(index["weight_map"].values()))
    moved = next(name for name, file in index["weight_map"].items() if file == names[0])
    index["weight_map"][moved] = names[1]
    index_path.write_text(json.dumps(index))
    with pytest.raises(ModelBroken) as caught:
        engine_runs.start(sharded)
    assert names[1] in caught.value.message and moved in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_named(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelBroken, match=r"index\.json"):
        engine_runs.start(sharded)


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ModelBroken, match="nothing-here"):
        engine_runs.start(tmp_path / "nothing-here")


def test_nothing_is_loaded_before_everything_is_checked(folder, monkeypatch):
    loaded = []
    monkeypatch.setattr(CheckpointWeights, "load", lambda self, packed: loaded.append(packed))
    rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelBroken):
        engine_runs.start(folder)
    assert not loaded


def test_shards_load_the_same_as_one_file(sharded, folder):
    config = parse_decoder_config(read_json_object(folder / "config.json"))
    one = CheckpointWeights(folder, config, torch.float32, CPU)
    many = CheckpointWeights(sharded, config, torch.float32, CPU)
    for packed in all_tensors(config):
        assert torch.equal(one.load(packed), many.load(packed))


def test_packed_tensors_are_the_checkpoints_one_under_the_other(folder):
    config = parse_decoder_config(read_json_object(folder / "config.json"))
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    source = CheckpointWeights(folder, config, torch.bfloat16, CPU)
    seen = set()
    for packed in all_tensors(config):
        tensor = source.load(packed)
        assert tensor.dtype is (torch.float32 if packed.is_norm else torch.bfloat16)
        assert torch.equal(tensor, torch.cat([stored[part.name] for part in packed.parts]).to(tensor.dtype))
        seen |= {part.name for part in packed.parts}
    assert seen == set(stored)


def test_tensors_that_nobody_asks_for_may_be_of_any_kind(folder):
    rewrite(folder, lambda tensors: tensors.update({"vision.mask": torch.zeros(3, dtype=torch.bool)}))
    safetensors.torch.save_file({"layers.0.wq": torch.ones(2)}, folder / "consolidated.safetensors")
    assert len(engine_runs.start(folder).run([[5]], engine_runs.greedy(3))[0].token_ids) == 3


def test_a_large_tensor_is_copied_in_pieces_without_a_gap(folder, monkeypatch):
    monkeypatch.setattr("kvctl.engine.weights._COPY_BYTES", 1000)  # five rows at a time
    test_packed_tensors_are_the_checkpoints_one_under_the_other(folder)


def test_dummy_weights_need_only_the_config_and_depend_on_the_seed_alone(folder):
    (folder / "model.safetensors").unlink()
    config = parse_decoder_config(read_json_object(folder / "config.json"))
    packed = list(all_tensors(config))
    first, again, other = (DummyWeights(config, torch.bfloat16, CPU, seed) for seed in (1, 1, 2))
    ours, same, different = ([source.load(p) for p in packed] for source in (first, again, other))
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))
    assert not torch.equal(ours[0], different[0])
    assert [tuple(t.shape) for t in ours] == [p.shape for p in packed]
    runs = [
        engine_runs.start(folder, load_format="dummy", dtype="auto", seed=seed).run([[5, 6, 7]], engine_runs.greedy(8))
        for seed in (1, 1)
    ]
    assert runs[0][0].token_ids == runs[1][0].token_ids
    assert all(0 <= token < tiny_models.VOCAB_SIZE for token in runs[0][0].token_ids)


def test_a_broken_folder_costs_no_time_even_if_it_is_large(tmp_path, folder):
    """A sparse 8 GB file that ends too early: read as a whole it would take seconds; only its header is."""
    edit_config(folder, vocab_size=10_000_000, hidden_size=400, num_attention_heads=4, num_key_value_heads=4)
    header = json.dumps({"model.embed_tokens.weight": {"dtype": "F32", "shape": [10_000_000, 400],
                                                       "data_offsets": [0, 16_000_000_000]}}).encode()  # fmt: skip
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8_000_000_000)
    used = time.process_time()
    with pytest.raises(KvctlError, match="cut short"):
        engine_runs.start(folder)
    assert time.process_time() - used < 1  # processor time: the machine may be busy, this must not be
