"""`--once`: measure, print, answer with an exit code. Imports little before it measures. Floor 3."""

import json
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError
from kvctl.top.look import Look
from kvctl.top.once import exit_code, watch_once
from kvctl.top.settings import LOCAL_HOSTS, TopSettings

if TYPE_CHECKING:
    from kvctl.top.gpu import GpuReading
    from kvctl.top.monitor import FleetView


def run_once(settings: TopSettings, look: Look, *, as_json: bool) -> int:
    """Print one page or object; return the exit code."""
    gpus: tuple[GpuReading, ...] = ()
    if settings.demo:
        fleet = _demo(settings)
    elif settings.replay is not None:
        fleet = _replayed(settings)
    else:
        fleet = _live(settings, as_json=as_json)
        if any(endpoint.host in LOCAL_HOSTS for endpoint in settings.endpoints):
            gpus = _read_gpus()
    if as_json:
        from kvctl.top.to_json import fleet_to_json

        print(json.dumps(fleet_to_json(fleet, gpus), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from kvctl.top.page import page_lines

        console = Console(highlight=False, soft_wrap=False)
        for line in page_lines(fleet, min(console.width, 120), look, gpus):
            console.print(line, no_wrap=True, crop=True, markup=False)
    return exit_code(fleet)


def _import_for_printing(*, as_json: bool) -> None:
    """Bring in what the end of the run needs, while it has to wait anyway."""
    if as_json:
        import kvctl.top.to_json
    else:
        import kvctl.top.page
    import kvctl.top.gpu  # noqa: F401


def _live(settings: TopSettings, *, as_json: bool) -> "FleetView":
    recorder = None
    if settings.record is not None:
        from kvctl.top.record import Recorder

        recorder = Recorder(settings.record)
    try:
        return watch_once(
            settings.endpoints,
            settings.options,
            settings.interval_s,
            summed=settings.summed,
            record=recorder.add if recorder is not None else None,
            meanwhile=lambda: _import_for_printing(as_json=as_json),
        )
    finally:
        if recorder is not None:
            recorder.close()


def _read_gpus() -> "tuple[GpuReading, ...]":
    from kvctl.top.gpu import GpuReader

    reader = GpuReader()
    gpus = reader.read()
    reader.close()
    return gpus


def _demo(settings: TopSettings) -> "FleetView":
    """The demo's servers after half a minute of play."""
    from kvctl.top.demo_source import DemoSource
    from kvctl.top.monitor import Monitor

    source = DemoSource(settings.interval_s)
    monitor = Monitor(dict(source.labels), 1.0)
    source.play_warm_up(monitor.add)
    return monitor.view(source.now_s(), settings.window_s, summed=settings.summed)


def _replayed(settings: TopSettings) -> "FleetView":
    """The end of the recording, as the screen would show it then."""
    from kvctl.top.monitor import Monitor
    from kvctl.top.record import read_record

    if settings.replay is None:
        raise ConfigError("no recording is given", hint="kvctl top --replay FILE")
    monitor = Monitor({}, settings.interval_s)
    last_s = 0.0
    for scrape in read_record(settings.replay):
        monitor.add(scrape)
        last_s = scrape.at_s
    if not last_s:
        raise ConfigError(f"{settings.replay} holds no scrape", hint="Record for longer.")
    return monitor.view(last_s, settings.window_s, summed=settings.summed)
