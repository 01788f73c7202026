"""The page of a sweep or search: curves over the load with the SLO's lines, every run in a table. Floor 3."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from kvctl.bench.figures import milliseconds, number, percent
from kvctl.bench.html_parts import head, table
from kvctl.bench.search import found_text, output_throughput
from kvctl.bench.svg_plot import Axis, LimitLine, Series, line_plot


def search_page(result: Mapping[str, Any]) -> str:
    """The body of the page: what was found, plots over the load, every run."""
    points = result["points"]
    last = points[-1]["results"][-1]
    name = result["parameter"]
    kinds = {"sweep": f"sweep over {name}", "max-rate": "highest rate that keeps the SLO", "knee": "knee of the curve"}
    parts = [head(last["config"], kinds[result["kind"]])]
    if result["kind"] != "sweep":
        parts.append(f'<div class="verdict"><p><b>{escape(found_text(result))}</b></p></div>')
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
                    number(summary["request_throughput"]),
                    number((summary["steady"] or summary)["output_throughput"]),
                    milliseconds(summary["ttft_ms"]["p50"]),
                    milliseconds(summary["ttft_ms"]["p99"]),
                    milliseconds(summary["tpot_ms"]["p50"]),
                    milliseconds(summary["tpot_ms"]["p99"]),
                    percent(goodput),
                    limits[0]["limit"] if limits else "-",
                    run["client"]["verdict"],
                ]
            )
    parts.append(f"<h2>All runs (latencies in ms)</h2>{table(header, rows)}")
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
