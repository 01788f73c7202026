"""Where the bundled profiles are: inside an installed package, or in the checkout of an editable one.

Knows folders only; what a file means is its reader's business. Floor 0.
"""

from functools import lru_cache
from pathlib import Path

from kvctl.errors import KvctlError


@lru_cache(maxsize=1)
def profiles_folder() -> Path:
    """The folder that holds hardware/, models/ and workloads/.

    Raises:
        KvctlError: the installation lacks its data.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_profiles", package.parent / "profiles"):
        if (folder / "hardware").is_dir():
            return folder
    raise KvctlError(
        f"the bundled profiles are missing beside {package}", hint="Reinstall kvctl; its package data are incomplete."
    )
