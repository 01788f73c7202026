"""One page for a run, a sweep or a search: figures, plots, definitions. Opens offline, light and dark, prints well.

Renders result objects; measures nothing. No script, no font, no address of anything outside the page. Floor 3.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvctl.bench.search import output_throughput
from kvctl.bench.server_report import LIMIT_MEANINGS
from kvctl.bench.svg_plot import Axis, LimitLine, Series, line_plot
from kvctl.bench.terminal import describe_load, says_nothing_new

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#59636e;--page:#fff;--card:#f6f8fa;--edge:#d1d9e0;--good:#1a7f37;
--bad:#b42318;--warn:#8a5a00;--series-1:#0072b2;--series-2:#d55e00;--series-3:#008060;--series-4:#a3478a;
--series-5:#9a6700;--series-6:#3a8fb7}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa5b1;--page:#0d1117;--card:#161b22;--edge:#30363d;
--good:#57c374;--bad:#ff8a7a;--warn:#e3b341;--series-1:#56b4e9;--series-2:#ff9a57;--series-3:#3fcf9f;
--series-4:#e39fd0;--series-5:#e6b84c;--series-6:#8fd0f0}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:24px 20px 60px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;margin:0 0 4px}h2{font-size:17px;margin:32px 0 10px}p{margin:4px 0}
.soft{color:var(--soft)}
.verdict{border-left:5px solid var(--good);background:var(--card);padding:10px 14px;
margin:16px 0}
.verdict.bad{border-color:var(--bad)}.verdict b{color:var(--good)}
.verdict.bad b{color:var(--bad)}.warn{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));gap:10px;margin:16px 0}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:6px;padding:10px 12px}
.tile .n{font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}.tile .l{color:var(--soft);font-size:13px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr));gap:16px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:60%}
th,td{padding:4px 12px 4px 0;text-align:right;border-bottom:1px solid var(--edge);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}
svg.plot{width:100%;height:auto;background:var(--card);border:1px solid var(--edge);border-radius:6px}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}svg .title{font-weight:600;font-size:13px}
svg .tick,svg .label{fill:var(--soft)}svg .grid{stroke:var(--edge);stroke-width:.7}
svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .dashed{stroke-dasharray:5 4}
svg .limit{stroke:var(--bad);stroke-width:1.3;stroke-dasharray:3 3}svg .limit-label{fill:var(--bad)}
svg .s1{stroke:var(--series-1)}svg .s2{stroke:var(--series-2)}svg .s3{stroke:var(--series-3)}
svg .s4{stroke:var(--series-4)}svg .s5{stroke:var(--series-5)}svg .s6{stroke:var(--series-6)}
svg .dot{fill:var(--card);stroke-width:2}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px}dt{font-weight:600}dd{margin:0;color:var(--soft)}
summary{cursor:pointer;font-weight:600}code{background:var(--card);padding:1px 5px;border-radius:4px}
@media (max-width:640px){dl{grid-template-columns:1fr}dd{margin-bottom:6px}}
"""
_LATENCY_ROWS = (
    ("ttft_ms", "TTFT"),
    ("ttft_due_ms", "TTFT from due"),
    ("ttfo_ms", "TTFO (first of the answer)"),
    ("tpot_ms", "TPOT"),
    ("gap_ms", "gap (pooled)"),
    ("max_gap_ms", "longest gap of a request"),
    ("e2e_ms", "E2E"),
    ("client_queue_ms", "waited in the client"),
)
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max", "n")


def render_html(result: Mapping[str, Any]) -> str:
    """The page for a result of one run, or of a sweep or search."""
    body = _run_page(result) if "summary" in result else _search_page(result)
    run = result if "summary" in result else result["points"][0]["results"][0]
    title = f"kvctl bench: {run['config']['model']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}{_definitions(result)}</body></html>\n"
    )


# ---- one run ----


def _run_page(result: Mapping[str, Any]) -> str:
    summary = result["summary"]
    parts = [_head(result["config"], describe_load(result["config"]["load"])), _verdict(result)]
    parts.append(_tiles(summary))
    parts.append(f"<h2>Latencies (ms)</h2>{_latency_table(summary)}")
    parts.append(f'<h2>Distributions</h2><div class="plots">{_cdfs(result)}</div>')
    parts.append(f'<h2>Over time</h2><div class="plots">{_timelines(result)}</div>')
    parts.append(_server(result["server"]))
    parts.append(_errors(result["errors"]))
    return "".join(parts)


def _head(config: Mapping[str, Any], load: str) -> str:
    return (
        f"<h1>{escape(str(config['model']))}</h1>"
        f'<p class="soft">{escape(config["url"])}{escape(config["endpoint"])} · {escape(load)} · '
        f"{escape(str(config['workload']['name']))} · {escape(config['date'])} · "
        f"kvctl {escape(config['kvctl_version'])} · seed {config['load']['seed']}</p>"
    )


def _verdict(result: Mapping[str, Any]) -> str:
    client = result["client"]
    lag = client["lag_ms"]
    is_bad = client["verdict"] != "valid"
    facts = f"timing by {'the kernel' if client['timing'] == 'kernel' else 'reads'}, lag p99 {_ms(lag['p99'])} ms, "
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
        (f"{_number(source['output_throughput'])}", f"output tok/s ({where})"),
        (f"{_number(source['request_throughput'])}", f"requests/s ({where})"),
        (f"{_ms(summary['ttft_ms']['p50'])} ms", "TTFT p50"),
        (f"{_ms(summary['tpot_ms']['p50'])} ms", "TPOT p50"),
        (f"{summary['completed']:,}", f"completed, {summary['failed']:,} failed, in {summary['duration_s']:.1f} s"),
        (f"{steady['mean_in_flight']:.1f}" if steady else f"{summary['max_in_flight']:,}", "in flight"),
    ]
    goodput = summary["goodput"]
    if goodput and goodput["share"] is not None:
        low, high = goodput["ci95"]
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo"].items())
        tiles.append((f"{goodput['share']:.1%}", f"goodput [{low:.1%}, {high:.1%}] for {limits}"))
    cells = "".join(
        f'<div class="tile"><div class="n">{escape(n)}</div><div class="l">{escape(told)}</div></div>'
        for n, told in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _latency_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for key, label in _LATENCY_ROWS:
        values = summary[key]
        if values["n"] and not says_nothing_new(key, summary):
            cells = [_ms(values[name]) for name in _STATISTICS[:-1]] + [f"{values['n']:,}"]
            rows.append([label, *cells])
    return _table(["", *_STATISTICS], rows)


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
            ["running, most / mean", f"{_number(server['running_max'])} / {_number(server['running_mean'])}"],
            ["waiting, most", _number(server["waiting_max"])],
            ["KV cache, most / mean", f"{_percent(server['kv_usage_max'])} / {_percent(server['kv_usage_mean'])}"],
            ["KV capacity, tokens", _number(server["kv_capacity_tokens"])],
            ["prefix hits", _percent(server["prefix_hit_rate"])],
            ["preemptions", _number(server["preemptions"])],
            ["tokens per step, mean", _number(server["step_tokens_mean"])],
        ]
        parts.append(_table(["", ""], rows))
        limits = [
            [
                entry["limit"],
                _percent(entry["share"]),
                f"{entry['first_s']:.1f} s",
                f"{entry['last_s']:.1f} s",
                LIMIT_MEANINGS[entry["limit"]],
            ]
            for entry in server["limits"]
        ]
        parts.append(
            f"<h2>What limited it, when</h2>{_table(['limit', 'of the time', 'first', 'last', 'meaning'], limits)}"
        )
    return "".join(parts)


def _errors(errors: Mapping[str, Any]) -> str:
    if not errors:
        return ""
    rows = [[kind, f"{entry['count']:,}", entry["first"][:200]] for kind, entry in errors.items()]
    return f"<h2>Errors</h2>{_table(['kind', 'count', 'the first said'], rows)}"


# ---- sweeps and searches ----


def _search_page(result: Mapping[str, Any]) -> str:
    points = result["points"]
    last = points[-1]["results"][-1]
    name = result["parameter"]
    kinds = {"sweep": f"sweep over {name}", "max-rate": "highest rate that keeps the SLO", "knee": "knee of the curve"}
    parts = [_head(last["config"], kinds[result["kind"]])]
    if result["kind"] != "sweep":
        found = "none that holds" if result["found"] is None else f"{name} {result['found']:g}"
        if result["ended_at_client"]:
            found += "; above it this client was the limit, not the server"
        parts.append(f'<div class="verdict"><p><b>found</b> {escape(found)}</p></div>')
    parts.append(f'<div class="plots">{_search_plots(result)}</div>')
    header = [
        name,
        "req/s",
        "output tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "goodput",
        "limit",
        "verdict",
    ]
    rows = []
    for point in points:
        for run in point["results"]:
            summary, limits = run["summary"], (run["server"] or {}).get("limits") or []
            goodput = (summary["goodput"] or {"share": None})["share"]
            rows.append(
                [
                    f"{point['value']:g}",
                    _number(summary["request_throughput"]),
                    _number((summary["steady"] or summary)["output_throughput"]),
                    _ms(summary["ttft_ms"]["p50"]),
                    _ms(summary["ttft_ms"]["p99"]),
                    _ms(summary["tpot_ms"]["p50"]),
                    _ms(summary["tpot_ms"]["p99"]),
                    _percent(goodput),
                    limits[0]["limit"] if limits else "-",
                    run["client"]["verdict"],
                ]
            )
    parts.append(f"<h2>All runs (latencies in ms)</h2>{_table(header, rows)}")
    return "".join(parts)


def _search_plots(result: Mapping[str, Any]) -> str:
    points, name = result["points"], result["parameter"]
    values = [point["value"] for point in points]
    x_axis = Axis("at once" if name == "concurrency" else "requests/s asked", is_log=max(values) > 10 * min(values))
    found = []
    if result["found"] is not None:
        found = [LimitLine(result["found"], f"{result['kind']} {result['found']:g}", vertical=True)]
    goodput = points[0]["results"][0]["summary"]["goodput"]
    slo = goodput["slo"] if goodput else {}
    throughput = Series("tok/s", [(p["value"], output_throughput(p["results"])) for p in points], 1, marks_points=True)
    plots = [line_plot("Output tokens/s", [throughput], x_axis, Axis("tokens/s", low=0.0), limits=found)]
    for key, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        series = [
            Series(
                statistic,
                [(p["value"], _mean_of(p["results"], f"{key}_ms", statistic)) for p in points],
                color,
                dashed=statistic == "p99",
                marks_points=True,
            )
            for statistic, color in (("p50", 1), ("p99", 2))
        ]
        lines = [*found, *([LimitLine(slo[key], f"SLO {slo[key]:g} ms")] if key in slo else [])]
        plots.append(
            line_plot(
                label,
                series,
                x_axis,
                Axis("ms", is_log=_spans(series), low=None if _spans(series) else 0.0),
                limits=lines,
            )
        )
    if goodput:
        shares = [(p["value"], _mean_goodput(p["results"])) for p in points]
        lines = [*found, LimitLine(result["slo_share"] * 100, f"wanted {result['slo_share']:.0%}")]
        plots.append(
            line_plot(
                "Goodput",
                [Series("goodput", shares, 3, marks_points=True)],
                x_axis,
                Axis("%", low=0.0, high=100.0),
                limits=lines,
            )
        )
    return "".join(plots)


def _spans(series: Sequence[Series]) -> bool:
    ys = [y for line in series for _, y in line.points if y is not None and y > 0]
    return bool(ys) and max(ys) > 20 * min(ys)


def _mean_of(results: Sequence[Mapping[str, Any]], key: str, statistic: str) -> float | None:
    values = [run["summary"][key][statistic] for run in results if run["summary"][key][statistic] is not None]
    return sum(values) / len(values) if values else None


def _mean_goodput(results: Sequence[Mapping[str, Any]]) -> float | None:
    shares = [run["summary"]["goodput"]["share"] for run in results if run["summary"]["goodput"]["share"] is not None]
    return sum(shares) / len(shares) * 100 if shares else None


# ---- small parts ----


def _definitions(result: Mapping[str, Any]) -> str:
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in result["definitions"].items())
    return f"<h2>Definitions</h2><details><summary>What each number means</summary><dl>{items}</dl></details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header) if any(header) else ""
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2}f}"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
