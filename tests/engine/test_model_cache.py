"""The cache of prepared models: whole or not there, under crashes, full disks, damage and two builders at once."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvctl.engine import model_cache
from kvctl.engine.model_cache import MANIFEST, cache_dir, ensure_folder
from kvctl.engine.progress import Report, silent
from kvctl.errors import ConfigError, KvctlError, ModelBroken


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Fills a folder and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path, report: Report) -> None:
        self.calls += 1
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)


def ensure(builder: Builder, source: str = "one", needed_bytes: int = 1) -> Path:
    return ensure_folder("tiny", source, builder, needed_bytes=needed_bytes, report=silent)


def entries(cache: Path) -> list[str]:
    return sorted(p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock"))


def test_it_is_built_once_and_then_only_looked_at(cache: Path) -> None:
    build = Builder()
    folder = ensure(build)
    assert folder == cache / "models" / "tiny"
    assert ensure(build) == folder
    assert build.calls == 1
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", MANIFEST, "model.safetensors"]
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o666 & ~_umask() & 0o444


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_another_source_builds_it_again() -> None:
    build = Builder()
    ensure(build, "one")
    ensure(build, "two")
    assert build.calls == 2


@pytest.mark.parametrize("damage", ["cut", "changed", "deleted", "no manifest", "half a manifest", "another manifest"])
def test_damage_is_found_and_repaired(damage: str) -> None:
    build = Builder()
    folder = ensure(build)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    good = weights.read_bytes()
    match damage:
        case "cut":
            weights.write_bytes(good[:-1])
        case "changed":
            weights.write_bytes(b"x" + good[1:])
        case "deleted":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "half a manifest":
            manifest.write_text(manifest.read_text()[:50])
        case _:
            manifest.write_text(json.dumps(["not", "ours"]))
    told: list[str] = []
    assert ensure_folder("tiny", "one", build, needed_bytes=1, report=lambda what, _: told.append(what)) == folder
    assert build.calls == 2
    assert weights.read_bytes() == good
    if damage in ("cut", "changed"):
        assert "model.safetensors" in told[0]


def test_a_copied_cache_with_new_file_times_is_not_built_again() -> None:
    build = Builder()
    folder = ensure(build)
    written_ns = (folder / "model.safetensors").stat().st_mtime_ns
    os.utime(folder / "model.safetensors", (1, 1))
    ensure(build)
    assert build.calls == 1
    # nor are its gigabytes read at every start from then on
    assert (folder / "model.safetensors").stat().st_mtime_ns == written_ns


def test_an_error_while_building_leaves_nothing(cache: Path) -> None:
    def fails(folder: Path, report: Report) -> None:
        (folder / "half").write_text("x")
        raise ModelBroken("no good")

    with pytest.raises(ModelBroken, match="no good"):
        ensure_folder("tiny", "one", fails, needed_bytes=1, report=silent)
    assert entries(cache) == []


def test_too_little_room_is_told_before_the_work(cache: Path) -> None:
    build = Builder()
    with pytest.raises(KvctlError, match="the model needs 1024 TiB") as caught:
        ensure(build, needed_bytes=1 << 50)
    assert "KVCTL_CACHE_DIR" in str(caught.value)
    assert build.calls == 0


def test_a_disk_that_fills_up_meanwhile_is_told_and_cleaned(cache: Path) -> None:
    """A limit on the size of a file makes the system refuse a write in the middle, as a full disk does."""

    def big(folder: Path, report: Report) -> None:
        (folder / "model.safetensors").write_bytes(bytes(1 << 20))

    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(KvctlError, match="no room left") as caught:
            ensure_folder("tiny", "one", big, needed_bytes=1, report=silent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(str(caught.value).splitlines()) == 2
    assert entries(cache) == []


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(KvctlError, match="cannot prepare the model") as caught:
        ensure(Builder())
    assert "KVCTL_CACHE_DIR" in str(caught.value)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVCTL_CACHE_DIR", "~/mine")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "mine"
    monkeypatch.delenv("KVCTL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "kvctl"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "kvctl"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVCTL_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", has_none)
    with pytest.raises(ConfigError, match="no home directory") as caught:
        cache_dir()
    assert "KVCTL_CACHE_DIR" in str(caught.value)


_SLOW_BUILD = """
import sys, time
from pathlib import Path
from kvctl.engine.model_cache import ensure_folder

def build(folder, report):
    (folder / "config.json").write_text("{}")
    with Path(sys.argv[1]).open("a") as log:
        log.write("built\\n")
    time.sleep(float(sys.argv[2]))
    (folder / "model.safetensors").write_bytes(b"whole" * 1000)

told = []
folder = ensure_folder("tiny", "one", build, needed_bytes=1, report=lambda what, done: told.append(what))
print(len((folder / "model.safetensors").read_bytes()), *told)
"""


def start(log: Path, seconds: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _SLOW_BUILD, str(log), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_of_several_processes_one_builds_and_all_get_the_model(tmp_path: Path, cache: Path) -> None:
    processes = [start(tmp_path / "log", 1.0) for _ in range(4)]
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert [answer.split()[0] for answer in answers] == ["5000"] * 4
    assert (tmp_path / "log").read_text() == "built\n"
    assert sum("Waiting for another kvctl" in answer for answer in answers) >= 1
    assert entries(cache) == ["tiny"]


def test_a_killed_build_leaves_no_model_and_the_next_one_cleans_up(tmp_path: Path, cache: Path) -> None:
    process = start(tmp_path / "log", 600)
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert not (cache / "models" / "tiny").exists()
    assert len(entries(cache)) == 1  # the half-built one, under a name that nobody takes for a model
    ensure(Builder())
    assert entries(cache) == ["tiny"]


def test_ctrl_c_in_the_middle_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    process = start(tmp_path / "log", 600)
    while not (tmp_path / "log").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert entries(cache) == []


def test_a_model_in_a_read_only_cache_can_be_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Builder()
    folder = ensure(build)
    # Root may write anywhere, so the permissions alone would prove nothing: no lock may even be asked for.
    monkeypatch.setattr(model_cache, "_lock", lambda *_: pytest.fail("took the lock"))
    assert ensure(build) == folder
