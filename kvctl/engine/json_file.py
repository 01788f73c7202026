"""Read the small JSON files of a model folder, each of which holds one object.

Knows no key of them. Whatever is wrong with a file is a ModelBroken that names it. Floor 2.
"""

import json
from pathlib import Path
from typing import Any

from kvctl.errors import ModelBroken


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """Return the object in `path`; with `missing_ok` an empty one where there is no such file.

    Raises:
        ModelBroken: missing, unreadable, not JSON or not an object.
    """
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
