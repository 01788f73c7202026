"""Tell a person how far a long preparation is: a bar on a terminal, one line for each stage elsewhere.

Work reports through the `Report` function it is given and knows no terminal. Everything goes to stderr. Floor 2.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# report(what is being done, share done from 0 to 1; None: no telling how long)
Report = Callable[[str, float | None], None]


def silent(what: str, done: float | None) -> None:
    """Report nothing."""


@contextmanager
def console_report() -> Iterator[Report]:
    """Yield a report function that draws on stderr: a Rich bar on a terminal, else a line for each new stage."""
    if not sys.stderr.isatty():
        yield _LineReport()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[share]:>4}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=False,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: float | None) -> None:
            if what not in tasks:
                for earlier in tasks.values():  # a stage that could not tell its share is over when the next begins
                    progress.update(earlier, total=1.0, completed=1.0, share="100%")
                tasks[what] = progress.add_task(what, total=None, share="")
            if done is not None:
                progress.update(tasks[what], total=1.0, completed=done, share=f"{done:.0%}")

        yield report


class _LineReport:
    def __init__(self) -> None:
        self._last = ""

    def __call__(self, what: str, done: float | None) -> None:
        if what != self._last:
            self._last = what
            print(f"{what} ...", file=sys.stderr, flush=True)
