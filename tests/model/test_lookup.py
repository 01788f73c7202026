"""Where a model is found: file, folder, Hub cache, catalogue, hub; offline, damaged, enormous."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import safetensors.numpy

from kvctl import __version__
from kvctl.errors import ConfigError, ModelBroken, ModelNotFound
from kvctl.model.lookup import MAX_CONFIG_BYTES, find_model

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10}


@pytest.fixture(autouse=True)
def no_cache_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def put_in_cache(tmp_path: Path, name: str, config: dict, *, weights: bool = False) -> Path:
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    (snapshot / "config.json").write_text(json.dumps(config))
    if weights:
        safetensors.numpy.save_file({"a": np.zeros((4, 4), np.float16)}, snapshot / "model.safetensors")
    return snapshot


def test_the_seeds_model_is_found_without_any_network() -> None:
    assert find_model("Qwen/Qwen2.5-7B-Instruct").source == f"catalogue of kvctl {__version__}"


def test_catalogue_names_do_not_depend_on_case() -> None:
    assert find_model("qwen/qwen2.5-7b-instruct").id == "Qwen/Qwen2.5-7B-Instruct"


def test_the_local_cache_comes_before_the_catalogue_and_tells_its_age(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "Qwen/Qwen2.5-7B-Instruct", {**CONFIG, "hidden_size": 128})
    found = find_model("Qwen/Qwen2.5-7B-Instruct")
    assert found.config["hidden_size"] == 128
    assert found.source == "Hugging Face cache, today"


def test_weights_in_the_cache_are_read_from_their_headers(tmp_path: Path) -> None:
    put_in_cache(tmp_path, "org/m", CONFIG, weights=True)
    found = find_model("org/m")
    assert found.tensors is not None and sum(t.num_bytes for t in found.tensors) == 32


def test_a_partial_download_tells_no_weights(tmp_path: Path) -> None:
    snapshot = put_in_cache(tmp_path, "org/m", CONFIG, weights=True)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model("org/m").tensors is None


def test_a_folder_and_a_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert find_model(str(tmp_path)).config == CONFIG
    assert find_model(str(tmp_path / "config.json")).config == CONFIG


@pytest.mark.parametrize("name", ["no/such-model", "./nothing", "/nothing/config.json", "x.gguf", "a/b/c", "a b"])
def test_what_is_not_there_is_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound):
        find_model(name)


@pytest.mark.parametrize("name", ["\0", "x\0y"])
def test_names_that_cannot_be_are_refused(name: str) -> None:
    with pytest.raises((ConfigError, ModelNotFound, ValueError)) as caught:
        find_model(name)
    assert not isinstance(caught.value, ValueError)


@pytest.mark.parametrize("content", [b"", b"hello", b"[1]", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_config_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelBroken):
        find_model(str(path))


def test_an_enormous_config_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)  # sparse: takes no room
    assert path.stat().st_size > MAX_CONFIG_BYTES
    with pytest.raises(ModelBroken, match="larger than"):
        find_model(str(path))


class _Hub(http.server.BaseHTTPRequestHandler):
    """Serves one model with a single weight file, by range only."""

    weights = b""
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        type(self).asked.append(f"{self.command} {self.path} {self.headers.get('range')}")
        content, status = b"", 404
        if self.path == "/org/m/resolve/main/config.json":
            content, status = json.dumps(CONFIG).encode(), 200
        elif self.path == "/org/m/resolve/main/model.safetensors":
            content, status = self.weights, 200
            span = self.headers.get("range")
            if span:
                first, last = map(int, span.removeprefix("bytes=").split("-"))
                content, status = content[first : last + 1], 206
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Hub]]:
    _Hub.asked = []
    _Hub.weights = safetensors.numpy.save({"a": np.zeros((100, 100), np.float32)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield _Hub
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_hub_gives_config_and_weight_headers_but_never_weights(hub: type[_Hub]) -> None:
    found = find_model("org/m")
    assert found.config == CONFIG
    assert found.tensors is not None and sum(t.num_bytes for t in found.tensors) == 40_000
    ranges = [line.rsplit(" ", 1)[1] for line in hub.asked if line.startswith("GET") and "safetensors " in line]
    assert "None" not in ranges
    assert all(int(r.split("-")[1]) < 1000 for r in ranges)


def test_a_model_that_the_hub_does_not_have_is_not_found(hub: type[_Hub]) -> None:
    with pytest.raises(ModelNotFound, match="no such model"):
        find_model("org/other")


def test_refresh_asks_the_hub_before_the_cache(hub: type[_Hub], tmp_path: Path) -> None:
    put_in_cache(tmp_path, "org/m", {**CONFIG, "hidden_size": 128})
    assert find_model("org/m").config["hidden_size"] == 128
    assert find_model("org/m", refresh=True).config["hidden_size"] == 64


def test_an_unreachable_hub_falls_back_and_costs_at_most_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    assert find_model("Qwen/Qwen3-8B", refresh=True).source == f"catalogue of kvctl {__version__}"
    with pytest.raises(ModelNotFound, match="cannot be reached"):
        find_model("no/such")
    assert time.monotonic() - started < 30  # two refusals at once; the limit itself is hub.REACH_S


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_folder_that_one_stands_in(name: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="MODEL is empty"):
        find_model(name)
