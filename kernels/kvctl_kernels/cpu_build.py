"""Compile the native CPU kernels once per machine and load them.

Knows the compiler and the cache folder; nothing of tensors. The library is built from the sources beside this file at
first use, into `$XDG_CACHE_HOME/kvctl/native` (or `~/.cache/...`), under a name made of everything it depends on:
sources, flags, compiler version, CPU features. So a home directory shared by different machines is safe.

Invariants: a library is loaded only if the sha256 appended to its file is right (a damaged one is built anew, never
run); a file appears under its name complete or not at all. Every failure is a `NativeUnavailable` with one line of why.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = (
    "cpu_native.cpp",
    "cpu_simd.h",
    "cpu_pool.h",
    "cpu_attention.h",
    "cpu_elementwise.h",
    "cpu_linear.h",
    "cpu_sampling.h",
    "cpu_stack.h",
)
# -O2: the hot loops are unrolled by hand; -O3 compiles four times longer for the same speed.
FLAGS = ("-std=c++20", "-O2", "-ffp-contract=fast", "-pthread", "-fPIC", "-shared", "-w")
COMPILE_LIMIT_S = 180
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The native kernels cannot be had here; the message says why in one line."""


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvctl" / "native"


@functools.cache
def load_native() -> ctypes.CDLL:
    """The kernels, compiled if need be.

    Raises:
        NativeUnavailable: no compiler, a failed build, no space, a library that does not load.
    """
    compiler = os.environ.get("CXX") or "c++"
    found = shutil.which(compiler)
    if found is None:
        raise NativeUnavailable(f"no C++ compiler ({compiler!r} is not on the PATH)")
    try:
        name = f"kvctl_cpu_{_fingerprint(found)}.so"
    except OSError as error:
        raise NativeUnavailable(f"the kernels' sources cannot be read: {error}") from error
    failure: Exception
    try:
        path = cache_folder() / name
        if not is_intact(path):
            _log.info("Compiling the CPU kernels for this machine, once (5 to 20 s)")
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            compile_to(path, found)
        return open_library(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        failure = error
    try:  # the cache cannot be written: build for this process alone; a loaded library needs no file any more
        with tempfile.TemporaryDirectory(prefix="kvctl-native-") as folder:
            path = Path(folder) / name
            compile_to(path, found)
            return open_library(path)
    except OSError:
        raise NativeUnavailable(f"cannot write the compiled kernels: {failure}") from failure


def is_intact(path: Path) -> bool:
    """Whether the file is there and ends with the sha256 of what comes before."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return len(body) > 0 and hashlib.sha256(body).digest() == digest


def _fingerprint(compiler: str) -> str:
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((folder / name).read_bytes())
    digest.update(" ".join(FLAGS).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_cpu_features().encode())
    return digest.hexdigest()[:24]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = ("flags", "features", "model name", "cpu family", "model", "cpu part")
    return platform.machine() + "".join(sorted({line for line in lines if line.split("\t")[0].lower() in named}))


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{Path(command[0]).name} failed: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
        raise NativeUnavailable(f"{Path(command[0]).name} exited with {done.returncode}: {lines[0][:200]}")
    return done.stdout


def compile_to(path: Path, compiler: str, target: str = "-march=native") -> None:
    """Compile the kernels for `target` into `path`, whole or not at all, with their checksum at the end.

    Raises:
        NativeUnavailable: the compiler fails.
        OSError: the file cannot be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    os.close(handle)
    try:
        _run([compiler, *FLAGS, target, "-o", temporary, str(Path(__file__).parent / SOURCES[0])])
        content = Path(temporary).read_bytes()
        with Path(temporary).open("ab") as file:
            file.write(hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def open_library(path: Path) -> ctypes.CDLL:
    """Load compiled kernels.

    Raises:
        NativeUnavailable: it is none, or not for this CPU.
    """
    try:
        library = ctypes.CDLL(str(path))
        library.kvctl_describe.restype = ctypes.c_char_p
        library.kvctl_describe.argtypes = []
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"the compiled kernels do not load: {error}") from error
    return library
