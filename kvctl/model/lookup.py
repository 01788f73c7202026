"""Find a model's facts by name: a file, a folder, standard input, the local Hub cache, the catalogue, the Hub.

Knows places, not what a config means. Never downloads a weight; a network that does not answer costs two seconds,
once. Reads the Hub cache's folders directly, because importing huggingface_hub takes longer than everything else
that `size` does. Floor 0.
"""

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvctl import __version__
from kvctl.errors import ConfigError, ModelBroken, ModelNotFound
from kvctl.model.gguf_header import read_gguf
from kvctl.model.profiles import profiles_folder
from kvctl.model.safetensors_header import TensorInfo, file_tensors
from kvctl.units import MIB

MAX_CONFIG_BYTES = 16 * MIB  # the largest published config.json has 0.3 MiB
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?\Z")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A config and where it was found. `tensors` None: no weight files there."""

    id: str
    config: dict[str, Any]
    source: str
    tensors: tuple[TensorInfo, ...] | None = None
    total_bytes: int | None = None  # of a GGUF file, whose tensors are priced already
    num_parameters: int | None = None


def parse_config(raw: bytes, where: str) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ModelBroken: not JSON, or not an object.
    """
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelBroken(f"{where} is not JSON: {error}", hint="Give a model's config.json.") from error
    if not isinstance(config, dict):
        raise ModelBroken(f"{where} holds a JSON {type(config).__name__}, not an object", hint="Give a config.json.")
    return config


def _read_limited(file: BinaryIO, where: str) -> bytes:
    raw = file.read(MAX_CONFIG_BYTES + 1)
    if len(raw) > MAX_CONFIG_BYTES:
        raise ModelBroken(f"{where} is larger than {MAX_CONFIG_BYTES // MIB} MiB", hint="Give a model's config.json.")
    return raw


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return parse_config(_read_limited(file, str(path)), str(path))
    except OSError as error:
        raise ModelBroken(f"{path} cannot be read: {error.strerror}", hint="Check its permissions.") from error


def find_model(name: str, *, refresh: bool = False) -> FoundModel:
    """Find a model by what the user wrote.

    Raises:
        ModelNotFound: no such file, folder or model.
        ModelBroken: it is there, but damaged.
        ModelNotSupported: a GGUF file of an unknown kind.
        ConfigError: the name cannot be a model's.
    """
    if not name.strip() or "\0" in name:
        raise ConfigError("MODEL is empty", hint="Give a hub id, a folder, a config.json, a .gguf file or -.")
    if name == "-":
        return FoundModel(
            "stdin", parse_config(_read_limited(sys.stdin.buffer, "standard input"), "standard input"), "stdin"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path, str(path), f"folder {path}")
    if path.is_file():
        if path.suffix == ".gguf":
            facts = read_gguf(path)
            return FoundModel(path.stem, facts.config, f"file {path}", None, facts.weight_bytes, facts.num_parameters)
        return FoundModel(_id_of(path), _read_config(path), f"file {path}")
    if name.startswith((".", "/", "~")) or name.endswith((".json", ".gguf")) or not _HUB_ID.match(name):
        raise ModelNotFound(f"{name} is neither a file nor a folder", hint="Give a hub id, a config.json or -.")
    return _by_hub_id(name, refresh=refresh)


def _by_hub_id(name: str, *, refresh: bool) -> FoundModel:
    from kvctl.model.hub import HubUnreachable, fetch_from_hub, is_offline  # httpx only when the network is asked

    problem = "the hub was not asked (HF_HUB_OFFLINE)"
    asked = False
    if refresh and not is_offline():
        asked = True
        try:
            return fetch_from_hub(name)
        except HubUnreachable as error:
            problem = error.message
    for place in (_from_cache, _from_catalogue):
        found = place(name)
        if found is not None:
            return found
    if not asked and not is_offline():
        try:
            return fetch_from_hub(name)
        except HubUnreachable as error:
            problem = error.message
    raise ModelNotFound(
        f"{name} is not in the local cache nor in the catalogue, and {problem}",
        hint="Give its config.json, or a folder.",
    )


def _id_of(path: Path) -> str:
    return path.parent.name if path.name == "config.json" and path.parent.name else path.stem.replace("__", "/")


def _age(path: Path) -> str:
    days = int((time.time() - path.stat().st_mtime) // 86400)
    return "today" if days <= 0 else "1 day old" if days == 1 else f"{days} days old"


def _from_folder(folder: Path, name: str, source: str) -> FoundModel:
    config = folder / "config.json"
    if not config.is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return find_model(str(ggufs[0]))
        raise ModelNotFound(f"{folder} has no config.json", hint="Give a model folder, or a .gguf file.")
    files = sorted(folder.glob("*.safetensors"))
    tensors = tuple(t for file in files for t in file_tensors(file)) if files and _is_complete(folder, files) else None
    return FoundModel(name, _read_config(config), source, tensors)


def _is_complete(folder: Path, files: list[Path]) -> bool:
    """Whether every shard that the index names is there; a partial download tells no size."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return True
    try:
        with index.open("rb") as file:
            named = set(parse_config(file.read(256 * MIB), index.name).get("weight_map", {}).values())
    except (OSError, AttributeError, TypeError):
        return False
    return named <= {file.name for file in files}


def hub_cache_folder() -> Path:
    """Where huggingface_hub keeps models on this machine. Source: its documented environment variables."""
    for variable, below in (("HF_HUB_CACHE", ""), ("HUGGINGFACE_HUB_CACHE", ""), ("HF_HOME", "hub")):
        value = os.environ.get(variable)
        if value:
            return Path(value).expanduser() / below
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def _from_cache(name: str) -> FoundModel | None:
    repository = hub_cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="ascii").strip()
        snapshots = [repository / "snapshots" / revision]
    except (OSError, ValueError):
        snapshots = sorted((repository / "snapshots").glob("*"))[-1:]
    for snapshot in snapshots:
        config = snapshot / "config.json"
        if config.is_file():
            return _from_folder(snapshot, name, f"Hugging Face cache, {_age(config)}")
    return None


def _from_catalogue(name: str) -> FoundModel | None:
    folder = profiles_folder() / "models"
    path = folder / f"{name}.json"
    if not path.is_file():
        wanted = name.lower()
        matches = [p for p in folder.glob("*/*.json") if f"{p.parent.name}/{p.stem}".lower() == wanted]
        if not matches:
            return None
        path = matches[0]
    return FoundModel(f"{path.parent.name}/{path.stem}", _read_config(path), f"catalogue of kvctl {__version__}")
