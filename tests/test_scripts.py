"""The scripts that make an environment: what they say when they cannot, and their help."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("script", ["quickstart", "test", "check"])
def test_help_says_how_to_call_it(script: str) -> None:
    result = run(f"scripts/{script}", "--help")
    assert result.returncode == 0
    assert f"usage: scripts/{script}" in result.stdout


def test_setup_without_extras_says_how_to_call_it() -> None:
    result = run("scripts/setup_venv")
    assert result.returncode == 2
    assert "usage: scripts/setup_venv EXTRA" in result.stdout


def test_a_machine_without_a_fit_python_is_told_what_to_install(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = run("scripts/setup_venv", "serve", KVCTL_PYTHON=str(old), KVCTL_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert "no Python >= 3.11" in lines[0]
    assert "KVCTL_PYTHON" in lines[1]


def test_an_environment_with_an_old_python_is_left_alone(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    python.chmod(0o755)
    result = run("scripts/setup_venv", "serve", KVCTL_VENV=str(tmp_path / "venv"))
    assert result.returncode == 1
    assert "has Python 3.9.1, kvctl needs 3.11 or newer" in result.stderr
    assert python.exists()


@pytest.mark.parametrize("script", ["setup_venv", "quickstart", "test", "check"])
def test_the_shell_scripts_stop_at_the_first_error(script: str) -> None:
    text = (ROOT / "scripts" / script).read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert run("bash", "-n", f"scripts/{script}").returncode == 0
