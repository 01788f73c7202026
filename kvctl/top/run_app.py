"""Runs the dashboard on this terminal and leaves the terminal as it was, whatever ends it. Floor 3."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError
from kvctl.top.app import TopApp
from kvctl.top.frame import ViewState
from kvctl.top.gpu import GpuReader
from kvctl.top.look import Look
from kvctl.top.settings import LOCAL_HOSTS, TopSettings
from kvctl.top.sources import LiveSource, Source

if TYPE_CHECKING:
    from kvctl.top.record import Recorder


def run_app(settings: TopSettings, look: Look) -> int:
    """Show the dashboard until the user leaves; return the exit code.

    Raises:
        ConfigError: there is no terminal, or the recording cannot be read or written.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("the dashboard needs a terminal", hint="Use kvctl top --once, or --once --json, in scripts.")
    source = make_source(settings)
    recorder = _open_recorder(settings)
    is_local = any(endpoint.host in LOCAL_HOSTS for endpoint in settings.endpoints)
    gpu_reader = GpuReader() if is_local and isinstance(source, LiveSource) else None
    state = ViewState(settings.window_s, settings.interval_s, source.title, summed=settings.summed)
    app = TopApp(source, look, state, gpu_reader=gpu_reader, on_scrape=recorder.add if recorder is not None else None)
    try:
        with _leaving_on_signals(app):
            app.run(mouse=False)
    finally:
        source.stop()
        if recorder is not None:
            recorder.close()
        if gpu_reader is not None:
            gpu_reader.close()
    return app.return_code or 0


def _open_recorder(settings: TopSettings) -> "Recorder | None":
    if settings.record is None:
        return None
    from kvctl.top.record import Recorder

    return Recorder(settings.record)


def make_source(settings: TopSettings) -> Source:
    """Return where the scrapes come from."""
    if settings.demo:
        from kvctl.top.demo_source import DemoSource

        return DemoSource(settings.interval_s)
    if settings.replay is not None:
        from kvctl.top.replay_source import ReplaySource

        return ReplaySource(settings.replay, settings.speed)
    return LiveSource(settings.endpoints, settings.options, settings.interval_s)


@contextlib.contextmanager
def _leaving_on_signals(app: TopApp) -> Iterator[None]:
    """End the application in order on a signal, so that the terminal is given back."""

    def leave(number: int, _frame: FrameType | None) -> None:
        app.call_later(app.interrupt if number == signal.SIGINT else app.exit)

    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
