"""From what a user names to a model folder on this machine, and the facts that a server needs before any weight.

A name is nothing (the demo model), a folder, a .gguf file or a hub id. Imports no torch and no transformers; does not
know which architectures the engine can run. Floor 2.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvctl.engine.progress import Report, console_report
from kvctl.errors import ConfigError, ModelBroken, ModelNotFound


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An ordinary Hugging Face model folder and the name under which it is served."""

    folder: Path
    name: str
    is_demo: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the small files of a model folder say.

    `eos_token_ids` are those of generation_config.json, else of config.json. `chat_template` is Jinja text.
    """

    config: dict[str, Any]
    architecture: str
    max_model_len: int  # tokens
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]
    chat_template: str | None
    vocab_size: int


def resolve_model(name: str | None, *, revision: str | None = None, progress: Report | None = None) -> ModelSource:
    """Find the model, and fetch or convert it if need be. `progress` None: bars on stderr.

    Raises:
        ModelNotFound: there is no such folder, file or hub model, or it cannot be fetched.
        ModelBroken: a file is damaged or missing.
        ModelNotSupported: a GGUF file of an architecture or quantisation that cannot be served.
        ConfigError: a revision of something that has none.
        KvctlError: no room for it on the disk.
    """
    path = Path(name).expanduser() if name else None
    is_demo = name is None or name == "demo"
    is_gguf = path is not None and path.suffix.lower() == ".gguf"
    looks_like_path = name is not None and (name.startswith((".", "/", "~")) or name.endswith("/") or is_gguf)
    if revision is not None and (is_demo or looks_like_path or (path is not None and path.exists())):
        raise ConfigError(f"--revision {revision}: only models of the hub have revisions", hint="Leave it out.")
    if is_demo or is_gguf:
        with console_report() if progress is None else nullcontext(progress) as report:
            if path is None or is_demo:
                from kvctl.engine.demo_model import DEMO_NAME, demo_folder

                return ModelSource(demo_folder(report), DEMO_NAME, is_demo=True)
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
    """Read config.json, generation_config.json and the chat template.

    Raises:
        ModelNotFound: no such folder.
        ModelBroken: a file is missing or damaged; names it.
    """
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}", hint="Check the path.")
    _require(folder, "config.json")
    config = _read_json(folder / "config.json")
    generation_config = _read_json(folder / "generation_config.json", missing_ok=True)
    text_config = config.get("text_config", config)  # multimodal models nest the language model's part
    if not isinstance(text_config, dict):
        raise _bad(folder / "config.json", "text_config", text_config, "an object")
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise _bad(folder / "config.json", "architectures", architectures, "a list with the model's class")
    return ModelFacts(
        config=config,
        architecture=architectures[0],
        max_model_len=_max_model_len(folder, text_config),
        eos_token_ids=_eos_token_ids(folder, generation_config, text_config, config),
        generation_config=generation_config,
        chat_template=_chat_template(folder),
        vocab_size=_positive(folder, text_config, "vocab_size"),
    )


def _require(folder: Path, name: str) -> None:
    if (folder / name).is_file():
        return
    gguf = next(folder.glob("*.gguf"), None)
    raise ModelBroken(
        f"{folder} has no {name}",
        hint=f"Name the file itself: {gguf}" if gguf else "A Hugging Face model folder is needed; fetch it again.",
    )


def _read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise ModelBroken(f"{path} is missing", hint="Fetch the model again.") from None
    except OSError as error:
        raise ModelBroken(f"cannot read {path}: {error.strerror}", hint="Check the file's permissions.") from None
    except (ValueError, RecursionError) as error:
        raise ModelBroken(f"{path} is not valid JSON: {error}", hint="Fetch the file again.") from None
    if not isinstance(value, dict):
        raise ModelBroken(f"{path} holds a {type(value).__name__}, not a JSON object", hint="Fetch the file again.")
    return value


def _bad(path: Path, key: str, value: object, expected: str) -> ModelBroken:
    text = "missing" if value is None else repr(value)
    return ModelBroken(f"{path}: {key} is {text[:80]}, expected {expected}", hint="Fetch the file again.")


def _positive(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _bad(folder / "config.json", key, value, "a positive whole number")
    return value


def _max_model_len(folder: Path, config: Mapping[str, Any]) -> int:
    """Return the longest context; stretched rotary embeddings count as vLLM counts them (config/model.py, 0.32)."""
    length = _positive(folder, config, "max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict) or str(config.get("model_type", "")).startswith("gemma3"):
        return length  # Gemma 3 states the stretched length
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    if kind in ("linear", "dynamic", "yarn") and isinstance(factor, int | float) and factor > 0:
        original = scaling.get("original_max_position_embeddings") if kind == "yarn" else None
        return int((original if isinstance(original, int) else length) * factor)
    return length


def _eos_token_ids(folder: Path, *configs: Mapping[str, Any]) -> tuple[int, ...]:
    for config in configs:
        value = config.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise _bad(folder, "eos_token_id", value, "a token id or a list of them")
        return tuple(ids)
    return ()


def _chat_template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelBroken(f"cannot read {path}: {error}", hint="Fetch the file again.") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _read_json(folder / name, missing_ok=True).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):  # several, by name
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            default = named.get("default")
            if isinstance(default, str):
                return default
    return None
