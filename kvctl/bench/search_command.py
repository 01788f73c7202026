"""Runs a sweep or a search from the command line: one preflight, one calibration, many loads, one table. Floor 3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from kvctl.bench.command import EXIT_CLIENT_LIMITED, EXIT_INTERRUPTED, EXIT_NOTHING, OutputOptions, write_outputs
from kvctl.bench.definitions import DEFINITIONS
from kvctl.bench.result import SCHEMA_VERSION
from kvctl.bench.runner import BenchConfig, Prepared, Progress, measure, prepare
from kvctl.bench.search import (
    Parameter,
    Sweep,
    ended_at_client,
    find_knee,
    find_max_rate,
    found_text,
    load_at,
    output_throughput,
    run_sweep,
)
from kvctl.errors import ConfigError


def run_search(config: BenchConfig, outputs: OutputOptions, progress: Progress) -> int:
    """Run the sweep or search that was asked for; returns the exit code.

    Raises:
        ConfigError: an impossible search.
        KvctlError: nothing could be measured, or a file could not be written.
    """
    if outputs.sweep is not None and outputs.find is not None:
        raise ConfigError("--sweep and --find exclude one another")
    if outputs.find not in (None, "max-rate", "knee"):
        raise ConfigError(f"nothing is known of {outputs.find!r}", hint="Write --find max-rate or --find knee.")
    if outputs.find == "max-rate" and config.report.slo is None:
        raise ConfigError("--find max-rate needs an SLO", hint="Give --slo ttft=500ms,tpot=50ms.")
    if config.load.arrivals is not None and outputs.find != "max-rate":
        raise ConfigError("a sweep and the search for the knee set the load themselves: --rate says nothing",
                          hint="Leave --rate out; --arrivals and --burstiness count.")  # fmt: skip
    sweep = Sweep.parse(outputs.sweep) if outputs.sweep is not None else None
    parameter: Parameter = sweep.parameter if sweep else "rate" if outputs.find == "max-rate" else "concurrency"
    most = int(max(sweep.values)) if sweep is not None and parameter == "concurrency" else 64
    prepared = prepare(replace(config, load=load_at(config.load, "concurrency", most)), progress)
    runner = _Runner(config, prepared, parameter, outputs.repeats, progress)
    found: float | None = None
    interrupted = False
    try:
        if sweep is not None:
            points = run_sweep(sweep, runner.run_at)
        elif outputs.find == "max-rate":
            arrivals = config.load.arrivals
            start = arrivals.segments[0].start_per_s if arrivals is not None else 1.0
            points, found = find_max_rate(runner.run_at, slo_share=outputs.slo_share, start=start)
        else:
            points, found = find_knee(runner.run_at, start=1)
    except _Interrupted:
        interrupted = True
        points = runner.points()
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "sweep" if sweep is not None else outputs.find,
        "parameter": parameter,
        "found": found,
        "ended_at_client": outputs.find == "max-rate" and not interrupted and ended_at_client(points, found),
        "slo_share": outputs.slo_share if config.report.slo is not None else None,
        "definitions": DEFINITIONS,
        "interrupted": interrupted,
        "points": points,
    }
    runs = [run for point in points for run in point["results"]]
    problem = write_outputs(result, runs, outputs) if runs else None
    if not outputs.quiet and str(outputs.json_file) != "-":
        Console().print(render_points(result))
    if problem is not None:
        raise problem
    if interrupted:
        return EXIT_INTERRUPTED
    if not any(run["summary"]["completed"] for run in runs):
        return EXIT_NOTHING
    return EXIT_CLIENT_LIMITED if all(run["client"]["verdict"] != "valid" for run in runs) else 0


class _Interrupted(Exception):
    """Ctrl-C: what was measured so far is kept."""


class _Runner:
    """Runs the load at one value, as often as asked, and keeps all results."""

    def __init__(
        self, config: BenchConfig, prepared: Prepared, parameter: Parameter, repeats: int, progress: Progress
    ) -> None:
        self._config = config
        self._prepared = prepared
        self._parameter = parameter
        self._repeats = repeats
        self._progress = progress
        self._done: dict[float, list[dict[str, Any]]] = {}

    def run_at(self, value: float) -> Sequence[Mapping[str, Any]]:
        """Run the repeats of one point."""
        results = self._done[value] = []
        for i in range(self._repeats):
            self._progress.say(f"{self._parameter} {value:g}" + (f", run {i + 1}" if self._repeats > 1 else ""))
            load = load_at(self._config.load, self._parameter, value)
            load = replace(load, seed=load.seed + 7919 * (len(self._done) * self._repeats + i))
            result, _ = measure(replace(self._config, load=load), self._prepared, self._progress)
            results.append(result)
            if result["interrupted"]:
                raise _Interrupted
        return results

    def points(self) -> list[dict[str, Any]]:
        """What was run so far."""
        return [{"value": value, "results": results} for value, results in sorted(self._done.items()) if results]


def render_points(result: Mapping[str, Any]) -> Table:
    """One line per point."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("at once" if result["parameter"] == "concurrency" else "rate", justify="right", no_wrap=True)
    for name in ("req/s", "tok/s", "TTFT p50", "p99", "TPOT p50", "goodput", "limit"):
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    table.add_column("")
    for point in result["points"]:
        run = point["results"][-1]
        summary = run["summary"]
        limits = (run["server"] or {}).get("limits") or []
        marks = []
        if point["value"] == result["found"]:
            marks.append("<- " + ("max rate" if result["kind"] == "max-rate" else "knee"))
        if run["client"]["verdict"] != "valid":
            marks.append("client limited")
        goodput = summary["goodput"]
        table.add_row(
            f"{point['value']:g}",
            f"{summary['request_throughput'] or 0:.3g}",
            f"{output_throughput(point['results']):,.0f}",
            _ms(summary["ttft_ms"]["p50"]),
            _ms(summary["ttft_ms"]["p99"]),
            _ms(summary["tpot_ms"]["p50"]),
            "-" if goodput is None or goodput["share"] is None else f"{goodput['share']:.1%}",
            limits[0]["limit"] if limits else "-",
            ", ".join(marks),
        )
    if result["kind"] != "sweep":
        told = found_text(result)
        table.caption, table.caption_justify = told, "left"
    return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
