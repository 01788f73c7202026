"""A user's cache of prepared model folders: built once, complete or not there at all, checked at each use.

Does not know how a model is made: the caller passes the function that fills an empty folder. Floor 2.

Invariants: a folder without `.` in front of its name holds a whole model. It is built under another name, under a lock
(of several processes one builds, the others wait and use the result), and renamed when its files are on the disk. What
a crash leaves behind is removed by the next build. `kvctl_manifest.json` holds each file's size, time and sha256: other
sizes mean damage, another time means that the sha256 is looked at, so that a start does not read gigabytes.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from kvctl.engine.progress import Report
from kvctl.errors import ConfigError, KvctlError
from kvctl.units import format_bytes

MANIFEST: Final = "kvctl_manifest.json"
_MANIFEST_FORMAT: Final = 1
_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_HASH_PIECE_BYTES: Final = 1 << 20


def cache_dir() -> Path:
    """Return where prepared models are kept: $KVCTL_CACHE_DIR, else $XDG_CACHE_HOME/kvctl, else ~/.cache/kvctl.

    Raises:
        ConfigError: none of them is there.
    """
    own = os.environ.get("KVCTL_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # relative ones count as unset (XDG)
        return Path(xdg) / "kvctl"
    try:
        return Path("~/.cache/kvctl").expanduser()
    except RuntimeError:  # a container's user without a name and without $HOME
        raise ConfigError(
            "there is no home directory to keep prepared models in", hint="Set KVCTL_CACHE_DIR to a folder."
        ) from None


def ensure_folder(
    name: str, source: str, build: Callable[[Path, Report], None], *, needed_bytes: int, report: Report
) -> Path:
    """Return the prepared folder `name`, built by `build(empty_folder, report)` unless it is there already.

    `source` says what it is made from; a folder made from something else is built again. `needed_bytes` must be free
    on the disk before the build begins.

    Raises:
        KvctlError: no room on the disk, or the cache folder cannot be written to; and whatever `build` raises.
    """
    folder = cache_dir() / "models" / name
    if _is_whole(folder, source, report):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{name}.lock", report):
            if not _is_whole(folder, source, report):  # another process may have built it while this one waited
                _build(folder, source, build, needed_bytes, report)
    except OSError as error:
        raise _told(error, folder.parent) from error
    return folder


def _told(error: OSError, where: Path) -> KvctlError:
    if error.errno in _NO_ROOM:
        return KvctlError(
            f"no room left in {where} while preparing the model (what was written is removed again)",
            hint="Free some disk space there, or set KVCTL_CACHE_DIR to a folder on another disk.",
        )
    return KvctlError(
        f"cannot prepare the model in {where}: {error.strerror or error} ({error.filename or 'no file'})",
        hint="Make that folder writable, or set KVCTL_CACHE_DIR to one that is.",
    )


def _build(folder: Path, source: str, build: Callable[[Path, Report], None], needed_bytes: int, report: Report) -> None:
    for left_over in folder.parent.glob(f".{folder.name}.partial-*"):  # of a process that was killed
        shutil.rmtree(left_over)
    free_bytes = shutil.disk_usage(folder.parent).free
    if free_bytes < needed_bytes:
        raise KvctlError(
            f"{folder.parent} has {format_bytes(free_bytes)} free, the model needs {format_bytes(needed_bytes)}",
            hint="Free some disk space there, or set KVCTL_CACHE_DIR to a folder on another disk.",
        )
    partial = folder.parent / f".{folder.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        build(partial, report)
        _write_manifest(partial, source)
        if folder.exists():  # damaged, or made from something else
            shutil.rmtree(folder)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def _lock(path: Path, report: Report) -> Iterator[None]:
    """Hold the only lock on `path`; the system releases it when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Waiting for another kvctl that prepares this model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_HASH_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _write_manifest(folder: Path, source: str) -> None:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # before the rename: after a power cut the name must not point to empty files
        status = path.stat()
        files[path.name] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "sha256": _sha256(path)}
    manifest = {"format": _MANIFEST_FORMAT, "source": source, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _is_whole(folder: Path, source: str, report: Report) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _MANIFEST_FORMAT or manifest["source"] != source:
            return False
        files = {folder / name: (f["size"], f["mtime_ns"], f["sha256"]) for name, f in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no manifest, or not one that was written whole: not our folder, or a damaged one
    try:
        for path, (size, mtime_ns, sha256) in files.items():
            status = path.stat()
            if status.st_size != size:
                report(f"Rebuilding the cached model: {path.name} is damaged", None)
                return False
            if status.st_mtime_ns == mtime_ns:
                continue
            if _sha256(path) != sha256:
                report(f"Rebuilding the cached model: {path.name} was changed", None)
                return False
            with suppress(OSError):  # of a read-only cache: looked at again next time
                os.utime(path, ns=(status.st_atime_ns, mtime_ns))
    except OSError:
        report("Rebuilding the cached model: a file is missing or cannot be read", None)
        return False
    return True
