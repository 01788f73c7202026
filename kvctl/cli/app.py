"""The `kvctl` command: finds the subcommand, turns our errors into two lines and an exit code.

Imports a subcommand's module only when it is asked for, so that `kvctl --help` answers at once; each such
module has `register(app)`, which adds its command to the application. Floor 4.

Exit codes of all commands: 0 ok / fits / healthy; 1 expected failure; 2 usage; 3 cannot tell; 4 does not fit;
5 regression or too many errors (bench); 6 the client was the limit (bench); 10 a limit binds (top); 130 Ctrl-C.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from kvctl import __version__
from kvctl.errors import KvctlError

COMMANDS = {
    "serve": "Serve a model through the paged KV engine behind an OpenAI-compatible API.",
    "size": "Say what fits, how many at once and how fast, from a config.json.",
    "bench": "Measure an OpenAI-compatible server, and the measurement's own error.",
    "top": "Watch running servers: which limit binds, and what to change.",
}
EXIT_INTERRUPTED = 130


def _print_version(asked: bool) -> None:
    if asked:
        print(f"kvctl {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Serve, size, measure and watch LLM inference: kvctl knows where every byte of KV cache goes."""


def build_app(argv: Sequence[str]) -> typer.Typer:
    """Build the application for one command line: the command it names in full, the others by name and help."""
    wanted = next((word for word in argv if not word.startswith("-")), None)
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(_root)
    for name, summary in COMMANDS.items():
        if name == wanted:
            import_module(f"kvctl.cli.{name}").register(app)
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def print_error(error: KvctlError) -> None:
    """Say what happened and what to do about it, on stderr."""
    print(f"kvctl: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"       {error.hint}", file=sys.stderr)


def main() -> None:
    """Run the command line and exit with its code."""
    argv = sys.argv[1:]
    try:
        build_app(argv)(args=argv, prog_name="kvctl")
    except KvctlError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvctl"):
            raise  # a bug of ours
        print_error(
            KvctlError(
                f"this needs the package {error.name}, which is not installed",
                hint='Install the engine and the server too: pip install "kvctl[serve]"',
            )
        )
        sys.exit(KvctlError.exit_code)
    except BrokenPipeError:  # `kvctl size ... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
