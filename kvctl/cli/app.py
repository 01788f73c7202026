"""The `kvctl` command: finds the subcommand, turns our errors into two lines and an exit code.

Imports a subcommand's module only when it is asked for, so that `kvctl --help` answers at once; each such
module has `register(app)`, which adds its command to the application. Imports nothing that takes time before `main`
has seen to Ctrl-C: a program that is stopped while it starts just ends. Floor 4.

Exit codes of all commands: 0 ok / fits / healthy; 1 expected failure; 2 usage; 3 cannot tell; 4 does not fit;
5 regression or too many errors (bench); 6 the client was the limit (bench); 10 a limit binds (top); 130 Ctrl-C.
"""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, NoReturn

from kvctl import __version__
from kvctl.errors import KvctlError

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "serve": "Serve a model through the paged KV engine behind an OpenAI-compatible API.",
    "size": "Say what fits, how many at once and how fast, from a config.json.",
    "bench": "Measure an OpenAI-compatible server, and the measurement's own error.",
    "top": "Watch running servers: which limit binds, and what to change.",
}
EXIT_INTERRUPTED = 130
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_app(argv: Sequence[str]) -> "typer.Typer":
    """Build the application for one command line: the command it names in full, the others by name and help."""
    import typer

    def print_version(asked: bool) -> None:
        if asked:
            print(f"kvctl {__version__}")
            raise typer.Exit

    def root(
        version: Annotated[
            bool,
            typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit."),
        ] = False,
    ) -> None:
        """Serve, size, measure and watch LLM inference: kvctl knows where every byte of KV cache goes."""

    wanted = next((word for word in argv if not word.startswith("-")), None)
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
    )
    app.callback()(root)
    for name, summary in COMMANDS.items():
        if name == wanted:
            import_module(f"kvctl.cli.{name}").register(app)
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def print_error(error: KvctlError) -> None:
    """Say what happened and what to do about it, on stderr; control characters (of a hostile file) as escapes."""
    print(f"kvctl: {_visible(error.message)}", file=sys.stderr)
    if error.hint:
        print(f"       {_visible(error.hint)}", file=sys.stderr)


def _visible(text: str) -> str:
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def main() -> None:
    """Run the command line and exit with its code."""
    argv = sys.argv[1:]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that has no box characters shows `?`
    try:
        with _ending_at_once_on_interrupt():
            app = build_app(argv)
        app(args=argv, prog_name="kvctl")
    except SystemExit as end:
        _flush_and_exit(end.code)
    except KvctlError as error:
        print_error(error)
        _flush_and_exit(error.exit_code)
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
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        _exit_unwritten(error)


@contextmanager
def _ending_at_once_on_interrupt() -> Iterator[None]:
    """While modules load there is nothing to tidy up: Ctrl-C ends the program without a word."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # ignored (a job in the background), or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _flush_and_exit(code: "int | str | None") -> NoReturn:
    """Write out what is still held back before the exit code is given: a full disk is told, not a success."""
    try:
        sys.stdout.flush()
    except OSError as error:
        _exit_unwritten(error, code)
    sys.exit(code)


def _exit_unwritten(error: OSError, code: "int | str | None" = 0) -> NoReturn:
    """End after output that could not be written: with `code` if the reader has left, in two lines for a full disk.

    Raises:
        OSError: the error, if it is about something else.
    """
    if not isinstance(error, BrokenPipeError) and error.errno not in _NO_ROOM:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is held back must not fail once more
    if isinstance(error, BrokenPipeError):  # `kvctl size ... | head`: the reader has seen enough
        sys.exit(code)
    hint = "Make room, or send the output elsewhere."
    print_error(KvctlError(f"the output cannot be written: {error.strerror}", hint=hint))
    sys.exit(KvctlError.exit_code)
