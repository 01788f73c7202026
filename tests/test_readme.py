"""README says what is true: its tables are generated, its commands and options exist, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from kvctl.cli.app import COMMANDS, build_app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "CHANGELOG.md")}


def commands() -> list[str]:
    """Every command line in README's shell blocks and in its inline code, without comments and pipes."""
    lines: list[str] = []
    for block in re.findall(r"```(?:sh|console)\n(.*?)```", README, re.DOTALL):
        lines += block.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:kvctl|scripts/|\.ci/)[^`\n]*)`", README)
    found = []
    for line in lines:
        command = re.split(r"\s+#|\s*[|&;]\s", line.strip().removeprefix("$ ").removeprefix(".venv/bin/python "))[
            0
        ].strip()
        command = re.sub(r"\s+>\s*\S+$", "", command)
        if command.startswith(("kvctl ", "scripts/", ".ci/")) and "..." not in command:
            found.append(command)
    return sorted(set(found))


def parse_kvctl(words: list[str]) -> None:
    """Parse a command line as kvctl would, without running it."""
    command = get_command(build_app(words))
    context = command.make_context("kvctl", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        rest = [*getattr(context, "_protected_args", ()), *context.args]
        if not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        assert command is not None
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("kvctl ")])
def test_every_kvctl_command_in_readme_parses(command: str) -> None:
    words = shlex.split(command)[1:]
    if words in (["--help"], ["--version"]) or (len(words) == 1 and words[0] in COMMANDS):
        return  # eager options; a command that the text only names
    parse_kvctl(words)


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("kvctl ")])
def test_every_script_in_readme_exists_with_its_options(command: str) -> None:
    program, *words = shlex.split(command)
    path = ROOT / program
    assert path.exists(), f"{program} is in README but not here"
    if not path.is_file():
        return
    options = [word.split("=")[0] for word in words[: words.index("--") if "--" in words else None]]
    options = [option for option in options if option.startswith("--")]
    if not options:
        assert path.suffix in (".py", ".txt") or path.stat().st_mode & 0o100, f"{program} cannot be executed"
        return
    run = [sys.executable, str(path)] if path.suffix == ".py" else [str(path)]
    help_text = subprocess.run([*run, "--help"], capture_output=True, text=True, check=True).stdout
    for option in options:
        assert option in help_text, f"{program} has no option {option}"


def test_readme_names_its_commands_at_all() -> None:
    found = commands()
    for wanted in ("kvctl serve", "kvctl size", "kvctl bench", "kvctl top", "scripts/quickstart", "scripts/test"):
        assert any(command.startswith(wanted) for command in found), f"README does not show {wanted}"


def test_a_command_that_does_not_exist_would_be_found() -> None:
    with pytest.raises(BaseException, match=r"no-such-option|No such option"):
        parse_kvctl(["serve", "--no-such-option"])


def test_the_generated_tables_are_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "update_readme.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_to_files_lead_to_files(page: str) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", PAGES[page]):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (ROOT / target).exists(), f"{page} links to {target}"


def test_the_first_screen_has_the_two_commands() -> None:
    head = "\n".join(README.splitlines()[:25])
    assert "scripts/quickstart" in head
    assert "kvctl serve" in head
