"""From a name to a folder, and the facts in the small files; broken files are named."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvctl.engine.model_source import read_model_facts, resolve_model
from kvctl.engine.progress import silent
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import ConfigError, ModelBroken, ModelNotFound, ModelNotSupported
from tests.support import byte_tokenizer, gguf_files
from tests.support.tiny_models import LLAMA, build

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "eos_token_id": 7,
}


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "cache"))


def write_folder(folder: Path, config: object = CONFIG, **files: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_folder_is_served_under_the_name_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("org/model", "./org/model", str(tmp_path / "org" / "model")):
        source = resolve_model(name)
        assert source.folder == tmp_path / "org" / "model"
        assert source.name == name


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(tmp_path: Path) -> None:
    def write(seed: int) -> None:
        model = build(LLAMA, seed)
        gguf_files.write_gguf(path, gguf_files.model_metadata(model.config), gguf_files.model_tensors(model))

    path = tmp_path / "Some Model.Q4.gguf"
    write(0)
    stages: list[str] = []
    source = resolve_model(str(path), progress=lambda what, _: stages.append(what))
    assert read_model_facts(source.folder).vocab_size == LLAMA.make_config().vocab_size
    first = (source.folder / "model.safetensors").read_bytes()
    assert stages
    stages.clear()
    assert resolve_model(str(path), progress=lambda what, _: stages.append(what)) == source
    assert not stages
    write(1)
    assert resolve_model(str(path), progress=silent) == source
    assert (source.folder / "model.safetensors").read_bytes() != first


def test_two_files_of_one_name_do_not_share_a_folder(tmp_path: Path) -> None:
    model = build(LLAMA)
    folders = set()
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        path = tmp_path / place / "model.gguf"
        gguf_files.write_gguf(path, gguf_files.model_metadata(model.config), gguf_files.model_tensors(model))
        folders.add(resolve_model(str(path), progress=silent).folder)
    assert len(folders) == 2


@pytest.mark.parametrize(
    ("name", "error", "named"),
    [
        ("./nothing", ModelNotFound, "there is no folder"),
        ("/no/such/folder", ModelNotFound, "there is no folder"),
        ("nothing.gguf", ModelNotFound, "there is no file"),
        ("folder.gguf", ModelNotFound, "is a folder"),
        ("text.txt", ModelNotFound, "not a .gguf file"),
        ("page.gguf", ModelBroken, "not a GGUF file"),
        ("empty", ModelBroken, "has no config.json"),
        ("no such model!", ModelNotFound, "no hub id"),
    ],
)
def test_what_is_no_model_is_named(
    name: str, error: type[Exception], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("folder.gguf").mkdir()
    Path("text.txt").touch()
    Path("page.gguf").write_text("<html>")
    with pytest.raises(error, match=named) as caught:
        resolve_model(name, progress=silent)
    assert len(str(caught.value).splitlines()) == 2


def test_a_folder_with_a_gguf_file_says_to_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.Q8_0.gguf").touch()
    with pytest.raises(ModelBroken, match=r"Name the file itself: .*model\.Q8_0\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", [None, "demo", "./x", "x.gguf"])
def test_only_hub_models_have_revisions(name: str | None) -> None:
    with pytest.raises(ConfigError, match="--revision main"):
        resolve_model(name, revision="main")


def test_facts_come_from_both_files(tmp_path: Path) -> None:
    write_folder(tmp_path, generation_config__json={"eos_token_id": [3, 4], "temperature": 0.6})
    facts = read_model_facts(tmp_path)
    assert facts.max_model_len == 4096
    assert facts.vocab_size == 100
    assert facts.eos_token_ids == (3, 4)
    assert facts.generation_config == {"eos_token_id": [3, 4], "temperature": 0.6}


def test_what_is_not_there_has_its_default(tmp_path: Path) -> None:
    facts = read_model_facts(write_folder(tmp_path))
    assert facts.eos_token_ids == (7,)
    assert facts.generation_config == {}


def test_gemma3_4b_leaves_out_what_equals_the_defaults(tmp_path: Path) -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    facts = read_model_facts(write_folder(tmp_path, published))
    assert (facts.max_model_len, facts.vocab_size, facts.eos_token_ids) == (131_072, 262_208, (1, 106))


def test_an_architecture_that_is_not_served_is_told_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match=f"{tmp_path}: the architecture MambaForCausalLM") as caught:
        read_model_facts(write_folder(tmp_path, CONFIG | {"architectures": ["MambaForCausalLM"]}))
    assert "LlamaForCausalLM" in caught.value.hint


def test_the_tokenizers_own_end_of_text_counts_too(tmp_path: Path) -> None:
    byte_tokenizer.save_tokenizer(tmp_path)
    facts = read_model_facts(write_folder(tmp_path))
    assert facts.end_token_ids(Tokenizer.load(tmp_path)) == {7, byte_tokenizer.EOS_ID}


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}}, 8192),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 4096),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 4096),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            4096,
        ),
    ],
)
def test_the_longest_context_counts_stretched_positions(changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert read_model_facts(write_folder(tmp_path, CONFIG | changes)).max_model_len == length


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list"),
        ("config.json", "[" * 100_000, r"config\.json is not valid JSON"),
        ("config.json", "\xff", r"config\.json is not valid JSON"),
        ("config.json", '{"architectures": []}', "'architectures' is"),
        ("config.json", json.dumps(CONFIG | {"vocab_size": "many"}), "'vocab_size' is 'many'"),
        ("config.json", json.dumps(CONFIG | {"architectures": ["Gemma3ForConditionalGeneration"]}), "'text_config'"),
        ("generation_config.json", "{,}", r"generation_config\.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id is '</s>'"),
    ],
)
def test_a_broken_file_is_named(name: str, text: str, named: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelBroken, match=named):
        read_model_facts(tmp_path)


def test_importing_it_pulls_no_torch() -> None:
    code = "import sys, kvctl.engine.model_source; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
