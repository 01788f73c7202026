"""Building and loading the native kernels when things are not as they should be.

The compiler is a stand-in that hands out the library compiled for this machine, so that no test waits for a compiler.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvctl.engine.layers.linear import select_linears
from kvctl.engine.ops import select_ops
from kvctl.errors import ConfigError
from kvctl_kernels import cpu_build


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache folder and a compiler that counts its calls; returns (cache folder, calls)."""
    real = cpu_build.load_native()
    compiler, log = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo stand-in 1.0; exit 0; }\n'
        f'echo call >> {log}\nwhile [ "$1" != -o ]; do shift; done\ncp {real._name} "$2"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu_build.load_native.cache_clear()
    yield cpu_build.cache_folder(), lambda: log.read_text().count("call") if log.exists() else 0
    cpu_build.load_native.cache_clear()


def reload():
    cpu_build.load_native.cache_clear()
    return cpu_build.load_native()


def test_compiled_once_then_taken_from_the_cache(fresh):
    folder, calls = fresh
    for _ in range(3):
        assert isinstance(reload(), ctypes.CDLL)
    assert calls() == 1
    (library,) = folder.iterdir()
    assert library.suffix == ".so"
    content = library.read_bytes()
    assert content[-32:] == hashlib.sha256(content[:-32]).digest()


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_library_is_built_anew(fresh, damage):
    folder, calls = fresh
    reload()
    (library,) = folder.iterdir()
    content = bytearray(library.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[len(content) // 2] ^= 1
    else:
        content = bytearray()
    library.unlink()  # the loaded one is mapped: a new file, as a crash or a bad disk leaves it
    library.write_bytes(content)
    reload()
    assert calls() == 2
    assert cpu_build.is_intact(library)


def test_every_source_file_is_part_of_the_fingerprint():
    folder = Path(cpu_build.__file__).parent
    assert set(cpu_build.SOURCES) == {path.name for path in folder.iterdir() if path.suffix in (".cpp", ".h")}


def test_other_sources_compilers_or_flags_make_another_library(fresh, monkeypatch):
    folder, calls = fresh
    reload()
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-g"))
    reload()
    assert calls() == 2
    assert len(list(folder.iterdir())) == 2


def test_an_unwritable_cache_costs_the_cache_only(fresh, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(reload(), ctypes.CDLL)


def test_no_home_directory_costs_the_cache_only(fresh, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cpu_build.Path, "home", homeless)
    assert isinstance(reload(), ctypes.CDLL)


def test_missing_sources_fall_back_to_torch(fresh, monkeypatch):
    monkeypatch.setattr(cpu_build, "SOURCES", ("gone.cpp",))
    cpu_build.load_native.cache_clear()
    assert "gone.cpp" in select_ops("cpu", torch.float32).reason


def test_no_space_anywhere_falls_back_to_torch(fresh, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cpu_build, "compile_to", full)
    ops = select_ops("cpu", torch.float32)
    assert ops.name == "torch"
    assert "No space left" in ops.reason
    assert "\n" not in ops.reason


def test_no_compiler_falls_back_to_torch(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu_build.load_native.cache_clear()
    assert select_ops("cpu", torch.bfloat16).name == "torch"
    assert "no-such-compiler" in select_ops("cpu", torch.bfloat16).reason
    assert "no-such-compiler" in select_linears("cpu", torch.bfloat16).reason
    assert select_linears("cpu", torch.bfloat16).name in ("torch", "onednn")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        select_ops("cpu", torch.float32, "native")
    with pytest.raises(ConfigError, match="no-such-compiler"):
        select_linears("cpu", torch.float32, "native")


def test_a_failing_compiler_is_quoted_in_one_line(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.cpp:1: fatal error: gone" >&2\nexit 1\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    cpu_build.load_native.cache_clear()
    ops = select_ops("cpu", torch.float32)
    assert ops.name == "torch"
    assert "fatal error: gone" in ops.reason
    assert not list(cpu_build.cache_folder().iterdir())


def test_something_that_is_no_library_falls_back_to_torch(fresh, monkeypatch, tmp_path):
    odd = tmp_path / "odd"
    odd.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nwhile [ "$1" != -o ]; do shift; done\necho no > "$2"\n')
    odd.chmod(0o755)
    monkeypatch.setenv("CXX", str(odd))
    cpu_build.load_native.cache_clear()
    assert "do not load" in select_ops("cpu", torch.float32).reason


def test_two_processes_that_build_at_once_both_get_a_good_library(fresh):
    folder, _ = fresh
    program = "from kvctl_kernels.cpu_build import load_native; print(load_native().kvctl_describe().decode())"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels")])}
    both = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert answers[0] == answers[1] != ""
    assert all(cpu_build.is_intact(path) for path in folder.iterdir())


def test_the_user_may_ask_for_torch_and_gets_no_reason():
    ops = select_ops("cpu", torch.float32, "torch")
    assert (ops.name, ops.reason) == ("torch", "")


def test_half_precision_runs_on_torch_with_the_reason():
    ops = select_ops("cpu", torch.float16)
    assert ops.name == "torch"
    assert "float16" in ops.reason
