"""One page of text: what `kvctl top --once` prints. Pure. Floor 3."""

from collections.abc import Sequence

from rich.text import Text

from kvctl.top import words
from kvctl.top.fleet_table import SortKey, arrange, fleet_lines, table_lines
from kvctl.top.gpu import GpuReading
from kvctl.top.lines import (
    gpu_lines,
    kv_lines,
    latency_lines,
    line,
    requests_lines,
    throughput_lines,
    verdict_lines,
)
from kvctl.top.look import Look
from kvctl.top.monitor import EngineView, FleetView
from kvctl.top.snapshot import Snapshot

_TITLE_WIDTH = 11


def page_lines(fleet: FleetView, width: int, look: Look, gpus: Sequence[GpuReading] = ()) -> list[Text]:
    """Return the whole page; with several engines the table first, then each engine's verdict and numbers."""
    lines: list[Text] = []
    if len(fleet.engines) > 1:
        rows = arrange(fleet.engines, SortKey.NAME, "")
        lines += [*fleet_lines(rows, width, look), *table_lines(rows, width, look), Text("")]
    for view in arrange(fleet.engines, SortKey.NAME, ""):
        lines += [_heading(view, width, look), *verdict_lines(view, width, look), Text("")]
        if view.snapshot is not None:
            lines += [*_numbers(view.snapshot, width, look), Text("")]
    lines += gpu_lines(gpus, width, look)
    while lines and not lines[-1].plain.strip():
        lines.pop()
    return lines


def _heading(view: EngineView, width: int, look: Look) -> Text:
    p = look.palette
    now = view.snapshot
    if now is None:
        return line((view.label, p.title), width=width, look=look)
    facts = [view.label, now.server.value, now.model, f"engine {now.engine}"]
    facts.append("one reading" if now.window_s is None else f"window {words.seconds(now.window_s)}")
    facts.append(words.clock(now.at_s))
    joined = f" {look.dot} ".join(fact for fact in facts[1:] if fact)
    return line((facts[0], p.title), (f" {look.dot} {joined}", p.dim), width=width, look=look)


def _numbers(now: Snapshot, width: int, look: Look) -> list[Text]:
    inner = width - _TITLE_WIDTH
    parts = [
        ("Requests", requests_lines(now, inner, look)),
        ("KV cache", kv_lines(now, inner, look)),
        ("Throughput", throughput_lines(now, inner, look)),
        ("Latency", latency_lines(now, inner, look)),
    ]
    lines = []
    for title, content in parts:
        for index, one in enumerate(content):
            head = f"{title if index == 0 else '':<{_TITLE_WIDTH}}"
            lines.append(Text.assemble((head, look.palette.calm), one, no_wrap=True, end=""))
    return lines
