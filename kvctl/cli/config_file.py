"""`--config file.yaml`: flags as keys, written as a command line would write them. Flags given there win. Floor 4."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError

_HINT = "Write one flag per line without the dashes, like `max-model-len: 8192`."


def config_file_arguments(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return what the file named in `arguments` adds to them, and the model it names.

    A key whose flag (or its --no- form) is among `arguments` is left out.

    Raises:
        ConfigError: the file cannot be read, or is no mapping of flags.
    """
    path = _find(arguments)
    if path is None:
        return [], None
    content = _read(Path(path))
    given = {word.partition("=")[0].replace("--no-", "--", 1) for word in arguments if word.startswith("--")}
    model = content.pop("model", content.pop("model_tag", None))
    words: list[str] = []
    for key, value in content.items():
        flag = "--" + str(key).lstrip("-").replace("_", "-")
        if flag == "--config":
            raise ConfigError(f"{path} names another config file", hint="One file only.")
        if flag not in given:
            words += _words(flag, value)
    return words, None if model is None else str(model)


def _find(arguments: Sequence[str]) -> str | None:
    for position, word in enumerate(arguments):
        if word == "--config" and position + 1 < len(arguments):
            return arguments[position + 1]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--config: {path} cannot be read: {reason}", hint=_HINT) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} holds no flags", hint=_HINT)
    return content


def _words(flag: str, value: Any) -> Iterator[str]:
    match value:
        case None:
            return
        case True:
            yield flag
        case False:
            if not flag.startswith("--disable-"):
                yield flag.replace("--", "--no-", 1)
        case list():
            for item in value:
                yield from _words(flag, item)
        case dict():
            yield f"{flag}={json.dumps(value)}"
        case _:
            yield f"{flag}={value}"
