"""From what a user names to a model folder on this machine, and the facts that a server needs before any weight.

A name is nothing (the demo model), a folder, a .gguf file or a hub id. config.json is read by `models.registry`, as
the engine reads it. Imports no torch and no transformers. Floor 2.
"""

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.engine.json_file import read_json_object
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.progress import Report, console_report
from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import ConfigError, ModelBroken, ModelNotFound, ModelNotSupported


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An ordinary Hugging Face model folder and the name under which it is served."""

    folder: Path
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the small files of a model folder say. `eos_token_ids`: of generation_config.json, else of config.json."""

    max_model_len: int  # tokens
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]

    def end_token_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """The tokens that end a text: the files', and the tokenizer's own.

        A finetuned chat model often ends its turns with its tokenizer's, while config.json still names the base
        model's.
        """
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        return frozenset((*self.eos_token_ids, *own))


def resolve_model(name: str | None, *, revision: str | None = None, progress: Report | None = None) -> ModelSource:
    """Find the model, and fetch or convert it if need be. `progress` None: bars on stderr.

    Raises:
        ModelNotFound: there is no such folder, file or hub model, or it cannot be fetched.
        ModelBroken: a file is damaged or missing.
        ModelNotSupported: a GGUF file of an architecture or quantisation that cannot be served.
        ConfigError: a revision of something that has none.
        KvctlError: no room for it on the disk.
    """
    path = _expanded(name) if name else None
    is_demo = name is None or name == "demo"
    is_gguf = path is not None and path.suffix.lower() == ".gguf"
    looks_like_path = name is not None and (name.startswith((".", "/", "~")) or name.endswith("/") or is_gguf)
    if revision is not None and (is_demo or looks_like_path or (path is not None and path.exists())):
        raise ConfigError(f"--revision {revision}: only models of the hub have revisions", hint="Leave it out.")
    if is_demo or is_gguf:
        with console_report() if progress is None else nullcontext(progress) as report:
            if path is None or is_demo:
                from kvctl.engine.demo_model import DEMO_NAME, demo_folder

                return ModelSource(demo_folder(report), DEMO_NAME)
            return ModelSource(_converted(path, report), str(name))
    assert path is not None and name is not None
    if path.is_dir():
        _require(path, "config.json")
        return ModelSource(path.absolute(), name)
    if path.exists():
        raise ModelNotFound(
            f"{path} is a file, but not a .gguf file", hint="Name a Hugging Face folder, a .gguf file or a hub id."
        )
    if looks_like_path:
        raise ModelNotFound(f"there is no folder {path}", hint="Check the path.")
    from kvctl.engine.hub_model import hub_folder

    return ModelSource(hub_folder(name, revision), name)


def _expanded(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~somebody whom this machine does not know
        raise ModelNotFound(f"{name}: {error}", hint="Write the path out.") from None


def _converted(path: Path, report: Report) -> Path:
    """Return the converted folder of a .gguf file; converts again when the file has changed."""
    from kvctl.engine.gguf_convert import CONVERTER_VERSION, convert_gguf, converted_size_bytes
    from kvctl.engine.model_cache import ensure_folder

    path = path.absolute()
    if path.is_dir():
        raise ModelNotFound(f"{path} is a folder, not a .gguf file", hint="Name the file inside it.")
    needed_bytes = converted_size_bytes(path)  # also the check that it is a whole file that we support
    status = path.stat()
    place = hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()[:12]
    return ensure_folder(
        f"{path.stem[:80]}-{place}",
        f"{path} of {status.st_size} bytes, changed {status.st_mtime_ns}, converter {CONVERTER_VERSION}",
        lambda folder, told: convert_gguf(path, folder, told),
        needed_bytes=needed_bytes + 50_000_000,  # the tokenizer's files
        report=report,
    )


def read_model_facts(folder: Path) -> ModelFacts:
    """Read config.json and generation_config.json.

    Raises:
        ModelNotFound: no such folder.
        ModelBroken: a file is missing or damaged; names it.
        ModelNotSupported: an architecture or a feature that is not served here.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}", hint="Check the path.")
    _require(folder, "config.json")
    config = read_json_object(folder / "config.json")
    generation_config = read_json_object(folder / "generation_config.json", missing_ok=True)
    try:
        decoder = parse_decoder_config(config)
    except (ModelBroken, ModelNotSupported) as error:
        raise type(error)(f"{folder}: {error.message}", hint=error.hint) from None
    text_config = config.get("text_config")  # multimodal models nest the language model's part
    return ModelFacts(
        max_model_len=decoder.max_position_tokens,
        vocab_size=decoder.vocab_size,
        eos_token_ids=_eos_token_ids(folder, generation_config, text_config, config),
        generation_config=generation_config,
    )


def _require(folder: Path, name: str) -> None:
    if (folder / name).is_file():
        return
    gguf = next(folder.glob("*.gguf"), None)
    raise ModelBroken(
        f"{folder} has no {name}",
        hint=f"Name the file itself: {gguf}" if gguf else "A Hugging Face model folder is needed; fetch it again.",
    )


def _eos_token_ids(folder: Path, *configs: object) -> tuple[int, ...]:
    for config in configs:
        value = config.get("eos_token_id") if isinstance(config, Mapping) else None
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelBroken(
                f"{folder}: eos_token_id is {str(value)[:80]!r}, expected a token id or a list of them",
                hint="Correct it in generation_config.json or config.json, or fetch the model again.",
            )
        return tuple(ids)
    return ()
