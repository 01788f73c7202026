"""Models of the hub: from the local cache without a network, and over HTTP from a small hub of our own."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvctl.errors import ModelNotSupported
from tests.support.tiny_models import LLAMA, save

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CODE = """
import sys
from kvctl.engine.model_source import resolve_model
from kvctl.errors import KvctlError
try:
    print(resolve_model(sys.argv[1], revision=sys.argv[2] if len(sys.argv) > 2 else None).folder)
except KvctlError as error:
    print(type(error).__name__, error)
"""


def resolve(*arguments: str, cache: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Resolve in a process of its own: huggingface-hub reads its environment when it is imported."""
    return subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env=os.environ | {"HF_HUB_CACHE": str(cache), "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )


def put_into_hub_cache(cache: Path, name: str) -> Path:
    """Lay a snapshot down as huggingface-hub does."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "tokenizer.json").write_text("{}")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in index["weight_map"].values():
        (snapshot / shard).touch()
    return snapshot


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub's HTTP interface that a download uses; serves `files` as the model some/model."""

    files: dict[str, bytes]
    asked: list[str]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(f"{self.command} {path}")
        if path in ("/api/models/some/model", "/api/models/some/model/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            self._answer(json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/some/model/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in self.files.items()]
            self._answer(json.dumps(tree).encode())
        elif path.startswith("/api/models/some/model/revision/"):
            self._answer(b"{}", 404, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/gated/"):
            self._answer(b"{}", 403, {"X-Error-Code": "GatedRepo"})
        elif (
            path.startswith(("/some/model/resolve/main/", f"/some/model/resolve/{COMMIT}/"))
            and path.rsplit("/", 1)[1] in self.files
        ):
            data = self.files[path.rsplit("/", 1)[1]]
            etag = hashlib.sha256(data).hexdigest()
            self._answer(data, 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"})
        else:
            self._answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

    def _answer(self, data: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def running_hub(files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address and the list of what it was asked."""
    handler = type("ThisHub", (Hub,), {"files": files, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("model")
    save(LLAMA, folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {"tokenizer.json": b"{}", "README.md": b"# words", "model.onnx": b"not needed"}


def test_a_model_in_the_cache_needs_no_network(tmp_path: Path) -> None:
    snapshot = put_into_hub_cache(tmp_path, "some/model")
    with running_hub({}) as (address, asked):
        result = resolve("some/model", cache=tmp_path, HF_ENDPOINT=address)
    assert result.stdout.strip() == str(snapshot)
    assert asked == []


def test_a_model_is_downloaded_once_without_what_serving_does_not_need(
    tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    with running_hub(model_files) as (address, asked):
        folder = Path(resolve("some/model", cache=tmp_path, HF_ENDPOINT=address).stdout.strip())
        assert {p.name for p in folder.iterdir()} == set(model_files) - {"README.md", "model.onnx"}
        for path in folder.iterdir():
            assert path.read_bytes() == model_files[path.name]
        asked.clear()
        assert resolve("some/model", cache=tmp_path, HF_ENDPOINT=address).stdout.strip() == str(folder)
        assert asked == []


def test_a_download_that_lacks_a_shard_is_no_model(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    files = {name: data for name, data in model_files.items() if not name.endswith(".safetensors")}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "model-00001-of-00002.safetensors": b""}
    with running_hub(files) as (address, _):
        answer = resolve("some/model", cache=tmp_path, HF_ENDPOINT=address).stdout
    assert answer.startswith("ModelBroken some/model is not whole")


def test_a_snapshot_with_a_missing_shard_is_completed_or_refused(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    snapshot = put_into_hub_cache(tmp_path, "some/model")
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    answer = resolve("some/model", cache=tmp_path, HF_HUB_OFFLINE="1").stdout
    assert answer.startswith("ModelNotFound some/model is not in the hub cache, and the hub cannot be reached")


def test_an_architecture_that_is_not_served_is_told_before_the_weights_come(
    tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    config = json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}).encode()
    with running_hub(model_files | {"config.json": config}) as (address, asked):
        answer = resolve("some/model", cache=tmp_path, HF_ENDPOINT=address).stdout
    assert answer.startswith("ModelNotSupported the architecture MambaForCausalLM is not supported")
    assert not any("safetensors" in request for request in asked)


def test_a_broken_config_is_told_before_the_weights_come(tmp_path: Path, model_files: dict[str, bytes]) -> None:
    for broken, words in ((b"{", "config.json is not valid JSON"), (b"[]", "config.json holds a list")):
        with running_hub(model_files | {"config.json": broken}) as (address, _):
            answer = resolve("some/model", cache=tmp_path / words, HF_ENDPOINT=address).stdout
        assert answer.startswith("ModelBroken ") and words in answer


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["some/nothing"], "there is no model some/nothing on the hub, and no such folder here"),
        (["gated/model"], "gated/model is a gated model of the hub"),
        (["some/model", "v9"], "some/model has no revision 'v9'"),
    ],
)
def test_what_the_hub_refuses_is_told(
    arguments: list[str], named: str, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    with running_hub(model_files) as (address, _):
        lines = resolve(*arguments, cache=tmp_path, HF_ENDPOINT=address).stdout.strip().splitlines()
    assert lines[0].startswith(f"ModelNotFound {named}")
    assert len(lines) == 2


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}],
                         ids=["offline", "nobody listens"])  # fmt: skip
def test_a_hub_that_cannot_be_reached_says_what_to_do(environment: dict[str, str], tmp_path: Path) -> None:
    result = resolve("some/other", cache=tmp_path, **environment)
    lines = result.stdout.strip().splitlines()
    assert lines[0].startswith("ModelNotFound some/other is not in the hub cache, and the hub cannot be reached")
    assert len(lines) == 2
    assert "name a local folder or .gguf file" in lines[1]


def test_a_model_without_safetensors_is_refused_before_the_download() -> None:
    from kvctl.engine.hub_model import _check_files

    with pytest.raises(ModelNotSupported, match=r"no config\.json with safetensors weights on the hub, only \.bin"):
        _check_files("some/model", {"pytorch_model.bin": 1, "config.json": 1})
    with pytest.raises(ModelNotSupported, match=r"only \.gguf"):
        _check_files("some/model", {"model.Q4_0.gguf": 1})
