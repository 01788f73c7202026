"""The page of one run: verdict, figures, distributions, what happened over time. Renders; measures nothing. Floor 3."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvctl.bench.figures import (
    LATENCY_ROWS,
    describe_load,
    milliseconds,
    number,
    percent,
    says_nothing_new,
    slo_text,
)
from kvctl.bench.html_parts import head, table
from kvctl.bench.server_report import LIMIT_MEANINGS
from kvctl.bench.svg_plot import Axis, LimitLine, Series, line_plot

_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "n")


def run_page(result: Mapping[str, Any]) -> str:
    """The body of the page: verdict, figures, distributions, timeline, server, errors."""
    summary = result["summary"]
    parts = [head(result["config"], describe_load(result["config"]["load"])), _verdict(result)]
    parts.append(_tiles(summary))
    parts.append(f"<h2>Latencies (ms)</h2>{_latency_table(summary)}")
    parts.append(f'<h2>Distributions</h2><div class="plots">{_cdfs(result)}</div>')
    parts.append(f'<h2>Over time</h2><div class="plots">{_timelines(result)}</div>')
    parts.append(_server(result["server"]))
    parts.append(_errors(result["errors"]))
    return "".join(parts)


def _verdict(result: Mapping[str, Any]) -> str:
    client = result["client"]
    lag = client["lag_ms"]
    is_bad = client["verdict"] != "valid"
    clock = "the kernel" if client["timing"] == "kernel" else "reads"
    facts = f"timing by {clock}, lag p99 {milliseconds(lag['p99'])} ms, "
    facts += f"{client['events_per_s']:,.0f} events/s, coalesced {client['coalesced_share']:.2%}, "
    facts += f"late {client['late']:,}, never sent {client['never_sent']:,}"
    notes = list(result["config"]["notes"])
    if result["interrupted"]:
        notes.append("interrupted: this is what was measured until then")
    if result["stopped_by_errors"]:
        notes.append("stopped: too many errors")
    warnings = "".join(f'<p class="warn">{escape(note)}</p>' for note in notes)
    return (
        f'<div class="verdict{" bad" if is_bad else ""}"><p><b>{escape(client["verdict"])}</b>'
        f' {escape(client["reason"])}</p><p class="soft">{escape(facts)}</p>{warnings}</div>'
    )


def _tiles(summary: Mapping[str, Any]) -> str:
    steady = summary["steady"]
    source = steady or summary
    where = f"steady, {steady['start_s']:.1f} to {steady['end_s']:.1f} s" if steady else "whole run"
    tiles = [
        (f"{number(source['output_throughput'])}", f"output tok/s ({where})"),
        (f"{number(source['request_throughput'])}", f"requests/s ({where})"),
        (f"{milliseconds(summary['ttft_ms']['p50'])} ms", "TTFT p50"),
        (f"{milliseconds(summary['tpot_ms']['p50'])} ms", "TPOT p50"),
        (f"{summary['completed']:,}", f"completed, {summary['failed']:,} failed, in {summary['duration_s']:.1f} s"),
        (f"{steady['mean_in_flight']:.1f}" if steady else f"{summary['max_in_flight']:,}", "in flight"),
    ]
    goodput = summary["goodput"]
    if goodput and goodput["share"] is not None:
        low, high = goodput["ci95"]
        limits = slo_text(goodput)
        tiles.append((f"{goodput['share']:.1%}", f"goodput [{low:.1%}, {high:.1%}] for {limits}"))
    cells = "".join(
        f'<div class="tile"><div class="n">{escape(n)}</div><div class="l">{escape(told)}</div></div>'
        for n, told in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _latency_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for key, label in LATENCY_ROWS:
        values = summary[key]
        if values["n"] and not says_nothing_new(key, summary):
            cells = [milliseconds(values[name]) for name in _STATISTICS[:-1]] + [f"{values['n']:,}"]
            rows.append([label, *cells])
    return table(["", *_STATISTICS], rows)


def _cdfs(result: Mapping[str, Any]) -> str:
    samples, slo = result["samples"], (result["summary"]["goodput"] or {"slo": {}})["slo"]
    ttft = [Series("TTFT", _cdf(samples.get("ttft_ms", ())), 1)]
    if samples.get("ttfo_ms") and samples["ttfo_ms"] != samples.get("ttft_ms"):
        ttft.append(Series("TTFO", _cdf(samples["ttfo_ms"]), 4))
    due = samples.get("ttft_due_ms")
    if due and (result["summary"]["client_queue_ms"]["max"] or 0) >= 1:
        ttft.append(Series("from due", _cdf(due), 2, dashed=True))
    gap = [Series("gap", [(x, y * 100) for x, y in samples.get("gap_cdf", ()) if x > 0], 3)]
    share = Axis("% of requests", low=0.0, high=100.0)
    return "".join(
        (
            line_plot("TTFT", ttft, Axis("ms", is_log=_is_wide(ttft)), share, limits=_slo_lines(slo, "ttft")),
            line_plot(
                "TPOT",
                [Series("TPOT", _cdf(samples.get("tpot_ms", ())), 1)],
                Axis("ms per token"),
                share,
                limits=_slo_lines(slo, "tpot"),
            ),
            line_plot(
                "Gaps between events, pooled", gap, Axis("ms", is_log=True), Axis("% of gaps", low=0.0, high=100.0)
            ),
            line_plot(
                "E2E",
                [Series("E2E", _cdf(samples.get("e2e_ms", ())), 1)],
                Axis("ms"),
                share,
                limits=_slo_lines(slo, "e2e"),
            ),
        )
    )


def _cdf(ordered: Sequence[float]) -> list[tuple[float, float | None]]:
    return [(value, (i + 1) / len(ordered) * 100) for i, value in enumerate(ordered)]


def _is_wide(series: Sequence[Series]) -> bool:
    xs = [x for line in series for x, _ in line.points if x > 0]
    return bool(xs) and max(xs) > 20 * min(xs)


def _slo_lines(slo: Mapping[str, float], name: str) -> list[LimitLine]:
    return [LimitLine(slo[name], f"SLO {slo[name]:g} ms", vertical=True)] if name in slo else []


def _timelines(result: Mapping[str, Any]) -> str:
    timeline, server = result["timeline"], result["server"] or {}
    times = [timeline["start_s"] + i * timeline["step_s"] for i in range(len(timeline["in_flight"]))]
    seconds = Axis("s after the start")
    plots = [
        line_plot(
            "Output tokens",
            [Series("tokens/s", list(zip(times, timeline["output_tokens_per_s"], strict=True)), 1)],
            seconds,
            Axis("tokens/s", low=0.0),
        )
    ]
    requests = [Series("in flight (client)", list(zip(times, timeline["in_flight"], strict=True)), 1)]
    told = server.get("timeline")
    if told:
        at = told["time_s"]
        requests.append(Series("running", list(zip(at, told["running"], strict=True)), 3))
        requests.append(Series("waiting", list(zip(at, told["waiting"], strict=True)), 2, dashed=True))
    plots.append(line_plot("Requests", requests, seconds, Axis("requests", low=0.0)))
    if told and any(value is not None for value in told["kv_usage"]):
        usage = [(t, None if v is None else v * 100) for t, v in zip(told["time_s"], told["kv_usage"], strict=True)]
        full = [LimitLine(95.0, "full")] if max((y or 0 for _, y in usage), default=0) > 60 else []
        plots.append(
            line_plot("KV cache in use", [Series("KV", usage, 4)], seconds, Axis("%", low=0.0, high=100.0), limits=full)
        )
    return "".join(plots)


def _server(server: Mapping[str, Any] | None) -> str:
    if not server:
        return '<h2>Server</h2><p class="soft">No metrics were read.</p>'
    parts = ["<h2>Server</h2>"]
    if server.get("warning"):
        parts.append(f'<p class="warn">{escape(server["warning"])}</p>')
    if server.get("roofline"):
        parts.append(f"<p>{escape(server['roofline']['text'])}</p>")
    if server.get("kind"):
        rows = [
            ["kind", str(server["kind"])],
            ["running, most / mean", f"{number(server['running_max'])} / {number(server['running_mean'])}"],
            ["waiting, most", number(server["waiting_max"])],
            ["KV cache, most / mean", f"{percent(server['kv_usage_max'])} / {percent(server['kv_usage_mean'])}"],
            ["KV capacity, tokens", number(server["kv_capacity_tokens"])],
            ["prefix hits", percent(server["prefix_hit_rate"])],
            ["preemptions", number(server["preemptions"])],
            ["tokens per step, mean", number(server["step_tokens_mean"])],
        ]
        parts.append(table(["", ""], rows))
        limits = [
            [
                entry["limit"],
                percent(entry["share"]),
                f"{entry['first_s']:.1f} s",
                f"{entry['last_s']:.1f} s",
                LIMIT_MEANINGS[entry["limit"]],
            ]
            for entry in server["limits"]
        ]
        parts.append(
            f"<h2>What limited it, when</h2>{table(['limit', 'of the time', 'first', 'last', 'meaning'], limits)}"
        )
    return "".join(parts)


def _errors(errors: Mapping[str, Any]) -> str:
    if not errors:
        return ""
    rows = [[kind, f"{entry['count']:,}", entry["first"][:200]] for kind, entry in errors.items()]
    return f"<h2>Errors</h2>{table(['kind', 'count', 'the first said'], rows)}"
