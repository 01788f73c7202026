"""`--once`: measure, print, answer with an exit code. Floor 3."""

import json

from rich.console import Console

from kvctl.errors import ConfigError
from kvctl.top.gpu import GpuReader, GpuReading
from kvctl.top.look import Look
from kvctl.top.monitor import FleetView, Monitor
from kvctl.top.once import exit_code, watch_once
from kvctl.top.page import page_lines
from kvctl.top.record import Recorder, read_record
from kvctl.top.settings import TopSettings
from kvctl.top.sources import DemoSource

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def run_once(settings: TopSettings, look: Look, *, as_json: bool) -> int:
    """Print one page or object; return the exit code."""
    gpus: tuple[GpuReading, ...] = ()
    if settings.demo:
        fleet = _demo(settings)
    elif settings.replay is not None:
        fleet = _replayed(settings)
    else:
        recorder = Recorder(settings.record) if settings.record is not None else None
        try:
            fleet = watch_once(
                settings.endpoints,
                settings.options,
                settings.interval_s,
                summed=settings.summed,
                record=recorder.add if recorder is not None else None,
            )
        finally:
            if recorder is not None:
                recorder.close()
        if any(endpoint.host in LOCAL_HOSTS for endpoint in settings.endpoints):
            reader = GpuReader()
            gpus = reader.read()
            reader.close()
    if as_json:
        from kvctl.top.to_json import fleet_to_json

        print(json.dumps(fleet_to_json(fleet, gpus), indent=2, allow_nan=False))
    else:
        console = Console(highlight=False, no_color=None, soft_wrap=False)
        for line in page_lines(fleet, min(console.width, 120), look, gpus):
            console.print(line, no_wrap=True, crop=True, markup=False)
    return exit_code(fleet)


def _demo(settings: TopSettings) -> FleetView:
    """The demo's servers after half a minute of play."""
    source = DemoSource(settings.interval_s)
    monitor = Monitor(dict(source.labels), 1.0)
    source.play_warm_up(monitor.add)
    return monitor.view(source.now_s(), settings.window_s, summed=settings.summed)


def _replayed(settings: TopSettings) -> FleetView:
    """The end of the recording, as the screen would show it then."""
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
