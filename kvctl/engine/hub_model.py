"""A model of the Hugging Face hub: from the local hub cache, and only if it is not whole there from the network.

Knows huggingface-hub and which files a served model needs; does not read them. Floor 2.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Final

from kvctl.errors import KvctlError, ModelNotFound, ModelNotSupported
from kvctl.units import format_bytes

_SMALL_FILES: Final = ["*.json", "*.jinja", "*.model", "*.txt"]
_WEIGHTS: Final = ["*.safetensors"]
_NOT_NEEDED: Final = ["original/*", "consolidated*", "*/*", "README*"]


def hub_folder(name: str, revision: str | None) -> Path:
    """Return the snapshot folder of a hub model, downloaded if need be.

    Raises:
        ModelNotFound: not a hub id, not on the hub, not permitted, or the hub cannot be reached.
        ModelNotSupported: the model has no safetensors weights.
        KvctlError: no room on the disk.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except HFValidationError:
        raise ModelNotFound(
            f"{name!r} is no folder, no file and no hub id", hint="A hub id looks like Qwen/Qwen2.5-0.5B-Instruct."
        ) from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        return _download(name, revision)
    return folder if is_whole(folder) else _download(name, revision)


def is_whole(folder: Path) -> bool:
    """Say whether config, tokenizer and every shard of the weights are there."""
    if not (folder / "config.json").is_file():
        return False
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return False
    if (folder / "model.safetensors").is_file():
        return True
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return all((folder / shard).is_file() for shard in set(index["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def _download(name: str, revision: str | None) -> Path:
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=15)
        sizes = {f.rfilename: f.size or 0 for f in info.siblings or () if "/" not in f.rfilename}
        _check_files(name, sizes)
        print(f"Downloading {name} from the hub ...", file=sys.stderr, flush=True)
        return Path(
            snapshot_download(
                name, revision=info.sha, allow_patterns=_SMALL_FILES + _WEIGHTS, ignore_patterns=_NOT_NEEDED
            )
        )
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
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == 28:
            raise KvctlError(f"no room left while downloading {name}", hint="Set HF_HOME to a larger disk.") from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{name} is not in the hub cache, and the hub cannot be reached ({reason[:120]})",
            hint="Check the network, or name a local folder or .gguf file; `kvctl serve` alone needs no hub.",
        ) from None


def _check_files(name: str, sizes: dict[str, int]) -> None:
    weights = {file: size for file, size in sizes.items() if file.endswith(".safetensors")}
    if not weights:
        kinds = sorted({Path(file).suffix for file in sizes if Path(file).suffix in (".bin", ".gguf", ".pt", ".pth")})
        raise ModelNotSupported(
            f"{name} has no safetensors weights on the hub" + (f", only {', '.join(kinds)}" if kinds else ""),
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
