"""Write scripts/constraints.txt: the versions, in this environment, of everything that kvctl and its extras need.

usage: .venv/bin/python scripts/pin_versions.py      after the whole test suite has passed with these versions
"""

import importlib.metadata
import re
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("serve", "test", "gpu")
HEAD = """\
# The versions that the tests pass with (Python 3.11). The scripts install exactly these; `pip install kvctl` does not.
# Written by scripts/pin_versions.py.
"""


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(name: str, extras: tuple[str, ...], found: dict[str, set[str]]) -> None:
    """Add a distribution and what it requires here to `found` (name -> the extras already followed)."""
    key = _key(name)
    fresh = set(extras) - found.get(key, set())
    if (key in found and not fresh) or key == "triton":
        return
    found.setdefault(key, set()).update(extras)
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            needed(requirement.name, tuple(requirement.extras), found)


def main() -> None:
    found: dict[str, set[str]] = {}
    needed("kvctl", EXTRAS, found)
    # Triton is left to pip: a CUDA build of torch asks for exactly one, and on a CPU any of pyproject's range will do.
    names = sorted(set(found) - {"kvctl", "pip", "setuptools", "wheel", "triton"})
    # A local part (2.13.0+cpu) would bind everybody to the build of this machine.
    pins = [f"{name}=={importlib.metadata.version(name).split('+')[0]}" for name in names]
    Path(__file__).with_name("constraints.txt").write_text(HEAD + "\n".join(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
