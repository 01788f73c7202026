"""What a person sees: progress while a load runs, the tables at its end. Right at 80 columns, with or without color.

Renders result objects and live counters; measures nothing. Floor 3.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvctl.bench.figures import LATENCY_ROWS, describe_load, milliseconds, says_nothing_new, slo_text
from kvctl.bench.load import LoadRun
from kvctl.bench.load_process import Watch
from kvctl.bench.run_config import LoadConfig
from kvctl.metrics.exposition import printable

_REFRESH_S = 0.5
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_POINTS = 40


def sparkline(values: Sequence[float]) -> str:
    """The values as bars from 0 to their maximum."""
    top = max(values, default=0.0)
    if top <= 0:
        return " " * len(values)
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)


class TerminalProgress:
    """Tells progress on stderr: live on a terminal, a line for each stage elsewhere."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self._console = console
        self._live = live and console.is_terminal

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(f"[dim]{escape(printable(text))}[/dim]", highlight=False)

    def watch(self, load: LoadConfig) -> Watch | None:
        """A live view of the load, where there is a terminal."""
        if not self._live:
            return None

        async def show(run: LoadRun) -> None:
            view = LiveView(load)
            with Live(console=self._console, auto_refresh=False, transient=True) as live:
                while True:
                    await asyncio.sleep(_REFRESH_S)
                    live.update(view.render(run, perf_counter()), refresh=True)

        return show


class SilentProgress:
    """Tells nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def watch(self, load: LoadConfig) -> Watch | None:
        """Nothing."""
        return None


class LiveView:
    """Rates and latencies since the last look."""

    def __init__(self, load: LoadConfig) -> None:
        self._load = load
        self._last_s = 0.0
        self._last_ended = 0
        self._last_tokens = 0.0
        self._ttfts_ms: list[float] = []

    def render(self, run: LoadRun, now_s: float) -> RenderableType:
        """The view at one moment."""
        collector = run.collector
        measured = collector.measured
        elapsed_s = max(now_s - measured.start_s, 1e-9)
        since_s = max(now_s - (self._last_s or measured.start_s), 1e-9)
        rate = (collector.num_ended - self._last_ended) / since_s
        tokens = (collector.output_tokens - self._last_tokens) / since_s
        self._last_s, self._last_ended, self._last_tokens = now_s, collector.num_ended, collector.output_tokens
        recent = sorted(collector.recent_ttft_s)
        collector.recent_ttft_s = []
        if recent:
            self._ttfts_ms = [*self._ttfts_ms, recent[len(recent) // 2] * 1e3][-_SPARK_POINTS:]
        done, total = self._done(collector.num_ended, elapsed_s)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(f"{elapsed_s:6.1f} s", ProgressBar(total=total, completed=min(done, total), width=40))
        grid.add_row("in flight", f"{collector.in_flight}   ended {collector.num_ended:,}   {rate:.1f} req/s")
        grid.add_row("output", f"{tokens:,.0f} tok/s of answers that ended")
        if self._ttfts_ms:
            grid.add_row("TTFT p50", Text(f"{self._ttfts_ms[-1]:8.1f} ms  {sparkline(self._ttfts_ms)}"))
        if measured.errors:
            told = "  ".join(f"{kind} {count:,}" for kind, count in measured.errors.most_common(4))
            grid.add_row("[red]errors[/red]", Text(told))
        return grid

    def _done(self, num_ended: int, elapsed_s: float) -> tuple[float, float]:
        shares = [0.0]
        if self._load.duration_s:
            shares.append(elapsed_s / self._load.duration_s)
        if self._load.num_requests:
            shares.append(num_ended / self._load.num_requests)
        return max(shares), 1.0


def render_result(result: Mapping[str, Any]) -> RenderableType:
    """The tables of one run."""
    summary, client = result["summary"], result["client"]
    parts: list[RenderableType] = [_headline(result), _throughput(summary), "", _latencies(summary), ""]
    goodput = summary["goodput"]
    if goodput is not None:
        parts.append(_goodput_line(goodput))
    parts += _server_lines(result["server"])
    parts += [
        Text.from_markup(
            f"[red]failed[/red]  {n['count']:,} x {escape(kind)}: {escape(printable(n['first'], limit=150))}"
        )
        for kind, n in result["errors"].items()
    ]
    parts += _client_lines(client)
    parts += [Text(f"note    {printable(note)}", style="yellow") for note in result["config"]["notes"]]
    if result["interrupted"]:
        parts.append(
            Text(
                f"interrupted: this is what was measured until then ({result['summary']['unfinished']} unfinished)",
                style="yellow",
            )
        )
    if result["stopped_by_errors"]:
        parts.append(Text("stopped: too many errors (--max-error-rate)", style="red"))
    return Group(*parts)


def _headline(result: Mapping[str, Any]) -> Text:
    config, summary = result["config"], result["summary"]
    text = Text()
    text.append(printable(str(config["model"]), limit=60), style="bold")
    text.append(f"  {printable(config['url'], limit=60)}{config['endpoint']}\n")
    text.append(f"{describe_load(config['load'])}; {printable(config['workload']['name'], limit=40)}; ")
    text.append(f"{summary['duration_s']:.1f} s; seed {config['load']['seed']}\n")
    return text


def _throughput(summary: Mapping[str, Any]) -> Table:
    steady = summary["steady"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("whole run", justify="right")
    table.add_column("steady window", justify="right")
    title = f"{steady['start_s']:.1f} to {steady['end_s']:.1f} s" if steady else "(too short for one)"
    table.add_row("requests", f"{summary['completed']:,} ok, {summary['failed']:,} failed", title)
    for name, label, unit in (
        ("request_throughput", "requests", "req/s"),
        ("output_throughput", "output", "tok/s"),
        ("total_throughput", "input + output", "tok/s"),
    ):
        table.add_row(label, _rate(summary[name], unit), _rate(steady[name], unit) if steady else "")
    table.add_row(
        "in flight", f"{summary['max_in_flight']:,} at most", f"{steady['mean_in_flight']:,.1f} mean" if steady else ""
    )
    return table


def _rate(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else 3}f} {unit}"


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("ms")
    for name in ("mean", "p50", "p90", "p95", "p99", "max", "n"):
        table.add_column(name, justify="right")
    for key, label in LATENCY_ROWS:
        values = summary[key]
        if not values["n"] or says_nothing_new(key, summary):
            continue
        cells = [milliseconds(values[name]) for name in ("mean", "p50", "p90", "p95", "p99", "max")]
        table.add_row(label, *cells, f"{values['n']:,}")
    return table


def _goodput_line(goodput: Mapping[str, Any]) -> Text:
    limits = slo_text(goodput)
    if goodput["share"] is None:
        return Text(f"goodput -  ({limits})")
    low, high = goodput["ci95"]
    return Text(
        f"goodput {goodput['share']:.1%} [{low:.1%}, {high:.1%}] of {goodput['all']:,}, "
        f"{goodput['requests_per_s']:.3g} req/s  ({limits})"
    )


def _server_lines(server: Mapping[str, Any] | None) -> list[RenderableType]:
    if server is None:
        return [Text("server  no metrics were read", style="dim")]
    lines: list[RenderableType] = []
    if server.get("kind"):
        facts = [f"{server['kind']}: running {_count(server['running_max'])} at most"]
        facts.append(f"waiting {_count(server['waiting_max'])}")
        if server["kv_usage_max"] is not None:
            facts.append(f"KV {server['kv_usage_max']:.0%}")
        if server["prefix_hit_rate"] is not None:
            facts.append(f"prefix hits {server['prefix_hit_rate']:.1%}")
        if server["preemptions"]:
            facts.append(f"{server['preemptions']:,.0f} preemptions")
        lines.append(Text("server  " + ", ".join(facts)))
        told = ", ".join(f"{entry['limit']} {entry['share']:.0%}" for entry in server["limits"] if entry["share"])
        if told:
            lines.append(Text(f"limit   {told} of the time"))
        if server.get("warning"):
            lines.append(Text(f"warning {server['warning']}", style="yellow"))
    roofline = server.get("roofline")
    if roofline:
        lines.append(Text(f"roofline {roofline['text']}"))
    return lines


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _client_lines(client: Mapping[str, Any]) -> list[RenderableType]:
    lag = client["lag_ms"]
    facts = [f"lag p99 {milliseconds(lag['p99'])} ms", f"{client['events_per_s']:,.0f} events/s"]
    facts.append(f"{client['cpu_share']:.0%} of a core")
    facts.append(f"coalesced {client['coalesced_share']:.1%}")
    if client["late"]:
        facts.append(f"late {client['late']:,}")
    if client["never_sent"]:
        facts.append(f"never sent {client['never_sent']:,}")
    style = "green" if client["verdict"] == "valid" else "bold red"
    verdict = Text()
    verdict.append(client["verdict"], style=style)
    verdict.append(f": {client['reason']}" if client["reason"] else "")
    return [Text("client  " + ", ".join(facts)), verdict]


def stderr_console() -> Console:
    """The console for progress."""
    return Console(file=sys.stderr)
