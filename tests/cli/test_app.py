"""The root command: help, version, unknown commands, and what is said when the engine is not installed."""

import subprocess
import sys

import pytest

from kvctl import __version__
from kvctl.cli.app import COMMANDS


def run(*arguments: str, prelude: str = "") -> "subprocess.CompletedProcess[str]":
    code = f"import sys\n{prelude}\nfrom kvctl.cli.app import main\nsys.argv = ['kvctl', *sys.argv[1:]]\nmain()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_help_and_version() -> None:
    help_page = run("--help")
    assert help_page.returncode == 0
    assert all(command in help_page.stdout for command in COMMANDS)
    assert run("--version").stdout == f"kvctl {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("serv")
    assert result.returncode == 2
    assert "serv" in result.stderr


@pytest.mark.parametrize("package", ["msgspec", "fastapi"])
def test_serve_without_the_engines_packages_says_what_to_install(package: str) -> None:
    """`pip install kvctl` alone has no engine; None in sys.modules is how Python notes that a module is not there."""
    result = run("serve", prelude=f"sys.modules['{package}'] = None")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == [
        f"kvctl: this needs the package {package}, which is not installed",
        '       Install the engine and the server too: pip install "kvctl[serve]"',
    ]
