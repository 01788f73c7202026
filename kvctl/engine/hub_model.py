"""A model of the Hugging Face hub: from the local hub cache, and only if it is not whole there from the network.

Knows huggingface-hub and which files a served model needs; does not read them. Floor 2.
"""

import errno
import shutil
import sys
from pathlib import Path
from typing import Final

from kvctl.engine.json_file import read_json_object
from kvctl.errors import KvctlError, ModelBroken, ModelNotFound, ModelNotSupported
from kvctl.units import format_bytes

_WANTED: Final = ["*.json", "*.jinja", "*.model", "*.txt", "*.safetensors"]
_NOT_NEEDED: Final = ["original/*", "consolidated*", "*/*"]


def hub_folder(name: str, revision: str | None) -> Path:
    """Return the snapshot folder of a hub model, downloaded if need be.

    Raises:
        ModelNotFound: not a hub id, not on the hub, not permitted, or the hub cannot be reached.
        ModelNotSupported: the model has no safetensors weights, or an architecture that is not served.
        ModelBroken: its config.json contradicts itself.
        KvctlError: no room on the disk.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(name, revision, from_cache=True)
    except HFValidationError:
        raise ModelNotFound(
            f"{name!r} is no folder, no file and no hub id", hint="A hub id looks like Qwen/Qwen2.5-0.5B-Instruct."
        ) from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        return _download(name, revision)
    return folder if is_whole(folder) else _download(name, revision)


def _snapshot(name: str, revision: str | None, *, from_cache: bool) -> Path:
    """Return the snapshot's folder; the cache's look uses the same patterns, or it would miss what was left out."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            name,
            revision=revision,
            local_files_only=from_cache,
            allow_patterns=_WANTED,
            ignore_patterns=_NOT_NEEDED,
        )
    )


def is_whole(folder: Path) -> bool:
    """Say whether config, tokenizer and every shard of the weights are there."""
    if not (folder / "config.json").is_file():
        return False
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return False
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = read_json_object(folder / "model.safetensors.index.json")
        return all((folder / shard).is_file() for shard in set(index["weight_map"].values()))
    except (ModelBroken, KeyError, AttributeError, TypeError):
        return False


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from kvctl.engine.models.registry import parse_decoder_config

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=15)
        sizes = {f.rfilename: f.size or 0 for f in info.siblings or () if "/" not in f.rfilename}
        _check_files(name, sizes)
        # Before gigabytes come: an architecture that is not served is told now.
        # By the branch's name, not its commit: so the cache notes which commit the name stands for.
        config = hf_hub_download(name, "config.json", revision=revision)
        parse_decoder_config(read_json_object(Path(config)))
        print(f"Downloading {name} from the hub ...", file=sys.stderr, flush=True)
        folder = _snapshot(name, revision, from_cache=False)
    except GatedRepoError:
        raise ModelNotFound(
            f"{name} is a gated model of the hub and may not be read",
            hint=f"Accept its terms at https://huggingface.co/{name}, then set HF_TOKEN.",
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFound(f"{name} has no revision {revision!r} on the hub", hint="Check --revision.") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(
            f"there is no model {name} on the hub, and no such folder here",
            hint="Check the spelling; a private model needs HF_TOKEN.",
        ) from None
    except (ModelBroken, ModelNotSupported):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise KvctlError(f"no room left while downloading {name}", hint="Set HF_HOME to a larger disk.") from None
        if not _is_about_the_network(error):
            raise
        reason = str(error).strip().partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise ModelNotFound(
            f"{name} is not in the hub cache, and the hub cannot be reached ({reason[:120]})",
            hint="Check the network, or name a local folder or .gguf file; `kvctl serve` alone needs no hub.",
        ) from None
    if not is_whole(folder):  # a connection that breaks off leaves what has come, without an error
        raise ModelBroken(
            f"{name} is not whole in {folder}: its config, tokenizer or a part of its weights is missing",
            hint="Start again to fetch the rest; what has come is kept.",
        )
    return folder


def _is_about_the_network(error: Exception) -> bool:
    """Say whether an exception comes from the hub or from a connection, whichever HTTP library the hub's uses."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled | LocalEntryNotFoundError | HfHubHTTPError | OSError):
        return True
    library = type(error).__module__.split(".")[0]
    return library in {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}


def _check_files(name: str, sizes: dict[str, int]) -> None:
    weights = {file: size for file, size in sizes.items() if file.endswith(".safetensors")}
    if "config.json" not in sizes or not weights:
        kinds = sorted({Path(file).suffix for file in sizes if Path(file).suffix in (".bin", ".gguf", ".pt", ".pth")})
        raise ModelNotSupported(
            f"{name} has no config.json with safetensors weights on the hub"
            + (f", only {', '.join(kinds)}" if kinds else ""),
            hint="Download a .gguf file and name it, or look for a repository with safetensors.",
        )
    from huggingface_hub import constants

    where = Path(constants.HF_HUB_CACHE)
    while not where.exists():
        where = where.parent
    free_bytes, needed_bytes = shutil.disk_usage(where).free, sum(weights.values())
    if free_bytes < needed_bytes:
        raise KvctlError(
            f"{where} has {format_bytes(free_bytes)} free, {name} needs {format_bytes(needed_bytes)}",
            hint="Free some disk space there, or set HF_HOME to a folder on another disk.",
        )
