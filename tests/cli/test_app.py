"""The root command: help, version, unknown commands, and what is said when the engine is not installed."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_ctrl_c_while_modules_load_ends_without_a_word() -> None:
    """The signal comes in the middle of an import, as when a user types Ctrl-C at once."""
    interrupting = (
        "import os, signal\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())"
    )
    result = run("size", "--help", prelude=interrupting)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize("module", ["kvctl.cli", "kvctl.cli.app", "typing", "contextlib"])
def test_ctrl_c_before_the_command_is_even_there_ends_without_a_word_too(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "for name in ('typing', 'contextlib'): sys.modules.pop(name, None)\n"
        "from kvctl.__main__ import main\n"
        "sys.argv = ['kvctl', '--version']\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("size", "--help"), ("size", "Qwen/Qwen2.5-0.5B-Instruct"), ("top", "--demo", "--once")],
)
def test_output_that_cannot_be_written_is_told_in_two_lines(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """A limit of zero bytes a file stands for the full disk."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    code = f"import sys\n{limit}\nfrom kvctl.cli.app import main\nmain()"
    with (tmp_path / "out").open("w") as out:
        command = [sys.executable, "-B", "-c", code, *arguments]
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines() == [
        "kvctl: the output cannot be written: File too large",
        "       Make room, or send the output elsewhere.",
    ]


def test_a_reader_that_leaves_gets_no_error_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from kvctl.cli.app import main; main()"
    arguments = ["size", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "t4", "--json"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert result.stderr == ""


def test_a_terminal_without_box_characters_gets_question_marks() -> None:
    result = run("size", "Qwen/Qwen2.5-0.5B-Instruct", prelude="sys.stdout.reconfigure(encoding='ascii')")
    assert result.returncode == 0
    assert "KV cache bytes per token" in result.stdout


def test_control_characters_in_a_hostile_config_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Foo\\u001b[31m"], "num_hidden_layers": 2}')
    result = run("size", str(tmp_path))
    assert result.returncode == 3
    assert "Foo\\x1b[31m" in result.stderr and "\x1b" not in result.stderr
