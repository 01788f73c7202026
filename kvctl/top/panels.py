"""The panels of the screen: each a box of text and history for one engine, at any size. Pure. Floor 3."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from kvctl.top import words
from kvctl.top.boxes import Block, box, fit
from kvctl.top.graph import draw
from kvctl.top.lines import kv_lines, latency_lines, line, requests_lines, throughput_lines, verdict_lines
from kvctl.top.look import Look
from kvctl.top.monitor import EngineView

Values = Sequence[float | None]
_MIN_GRAPH_ROWS = 1
_LABEL_WIDTH = 7
_SPLIT_VERDICT_WIDTH = 130
_BESIDE_WIDTH = 120  # from here the latency table and its graphs stand side by side


@dataclass(frozen=True, slots=True)
class Curve:
    """One history to draw: its name, values, how its maximum is written, and a fixed full height or None."""

    name: str
    values: Values
    show: Callable[[float | None], str]
    style: str
    top: float | None = None


def requests_panel(view: EngineView, width: int, height: int, look: Look) -> Block:
    """Running and waiting."""
    points = view.points
    curves = [
        Curve("wait", [p.waiting for p in points], words.count, look.palette.bad),
        Curve("run", [p.running for p in points], words.count, look.palette.graph),
    ]
    if height < 9:  # one curve only: the queue if there has been one, since that is the news
        has_queue = any(p.waiting for p in points)
        curves = curves[:1] if has_queue else curves[1:]
    text = requests_lines(view.snapshot, width - 4, look) if view.snapshot else []
    return _panel("1", "Requests", text, curves, width, height, look)


def kv_panel(view: EngineView, width: int, height: int, look: Look) -> Block:
    """KV cache use, and what the prefix cache finds."""
    points = view.points
    curves = [Curve("KV", [p.kv_usage for p in points], words.percent, look.palette.graph, top=1.0)]
    if height >= 11:
        hits = [p.prefix_hit_rate for p in points]
        curves.append(Curve("hits", hits, words.percent, look.palette.graph_alt, top=1.0))
    text = kv_lines(view.snapshot, width - 4, look) if view.snapshot else []
    return _panel("2", "KV cache", text, curves, width, height, look)


def throughput_panel(view: EngineView, width: int, height: int, look: Look) -> Block:
    """Tokens out and in per second."""
    points = view.points
    curves = [Curve("out/s", [p.generation_tokens_per_s for p in points], words.rate, look.palette.graph)]
    if height >= 9:
        incoming = [p.prompt_tokens_per_s for p in points]
        curves.append(Curve("in/s", incoming, words.rate, look.palette.graph_alt))
    text = throughput_lines(view.snapshot, width - 4, look) if view.snapshot else []
    return _panel("3", "Tokens", text, curves, width, height, look)


def latency_panel(view: EngineView, width: int, height: int, look: Look) -> Block:
    """The table of latencies; history of the first token's below it where there is room."""
    points = view.points
    curves = [
        Curve("ttft", [p.ttft_mean_s for p in points], words.seconds, look.palette.graph),
        Curve("between", [p.itl_mean_s for p in points], words.seconds, look.palette.graph_alt),
    ]
    is_wide = width >= _BESIDE_WIDTH
    table_width = 80 if is_wide else width - 4
    text = latency_lines(view.snapshot, table_width, look, max_lines=height - 2) if view.snapshot else []
    if not is_wide:
        curves = curves if height - 2 - len(text) >= 4 else []
        return _panel("4", "Latency", text, curves, width, height, look)
    graph_width = width - 4 - table_width - 2
    drawn: list[Text] = []
    for index, curve in enumerate(curves):
        drawn += _graph(curve, graph_width, (height - 2 - len(drawn)) // (len(curves) - index), look)
    rows = [
        Text.assemble(fit(text[i] if i < len(text) else Text(""), table_width + 2), drawn[i], no_wrap=True, end="")
        for i in range(len(drawn))
    ]
    return _panel("4", "Latency", rows, [], width, height, look)


PANELS: Sequence[Callable[[EngineView, int, int, Look], Block]] = (
    requests_panel,
    kv_panel,
    throughput_panel,
    latency_panel,
)


def verdict_panel(view: EngineView, width: int, height: int, look: Look) -> Block:
    """The verdict in a frame of its colour: what to read first. Wide: the evidence stands to the right."""
    finding = view.verdict.finding
    inner = width - 4
    style = look.of(finding.limit, finding.confidence)
    title = line(("Verdict", style), width=inner, look=look)
    if width < _SPLIT_VERDICT_WIDTH:
        return box(title, verdict_lines(view, inner, look, max_lines=height - 2), width, height, look, style=style)
    left_width = inner * 3 // 5
    left = verdict_lines(view, left_width, look, max_lines=height - 2, with_evidence=False)
    right = [line(("why", look.palette.calm), width=inner, look=look)] if finding.evidence else []
    right_width = inner - left_width - 2
    right += [
        line((f"{look.dot} {e.text}", look.palette.label), width=right_width, look=look) for e in finding.evidence
    ]
    rows = []
    for index in range(min(height - 2, max(len(left), len(right)))):
        one = fit(left[index] if index < len(left) else Text(""), left_width + 2)
        rows.append(Text.assemble(one, right[index] if index < len(right) else "", no_wrap=True, end=""))
    return box(title, rows, width, height, look, style=style)


def _panel(
    number: str, name: str, text: Sequence[Text], curves: Sequence[Curve], width: int, height: int, look: Look
) -> Block:
    title = line((number, look.palette.calm), (f" {name}", look.palette.title), width=width, look=look)
    rows = list(text)[: height - 2]
    left = height - 2 - len(rows)
    for index, curve in enumerate(curves):
        share = left // (len(curves) - index)
        if share >= _MIN_GRAPH_ROWS:
            rows += _graph(curve, width - 4, share, look)
            left -= share
    return box(title, rows, width, height, look)


def _graph(curve: Curve, width: int, rows: int, look: Look) -> list[Text]:
    """The curve with its name and its highest value at the left."""
    inner = width - _LABEL_WIDTH - 1
    known = [value for value in curve.values[-inner * 2 :] if value is not None]
    highest = max(known, default=None)
    drawn = draw(curve.values, inner, rows, top=curve.top, glyphs=look.glyphs)
    lines = []
    for index, content in enumerate(drawn):
        label = curve.show(curve.top if curve.top is not None else highest) if index == 0 and rows > 1 else ""
        if index == rows - 1:
            label = curve.name
        lines.append(
            line((f"{label:>{_LABEL_WIDTH}} ", look.palette.dim), (content, curve.style), width=width, look=look)
        )
    return lines
