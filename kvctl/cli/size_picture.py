"""The drawn parts of the page of `kvctl size`: the memory bar to scale, and requests over context as a small plot.

Pure drawing with Rich; decides nothing. Floor 4.
"""

from collections.abc import Iterable
from math import log2

from rich import box
from rich.table import Table
from rich.text import Text

from kvctl.sizing.memory import Range
from kvctl.sizing.request import SizeAnswer
from kvctl.units import GIB, format_bytes, format_count

PAGE_COLUMNS = 80
_CURVE_CONTEXTS = tuple(1 << i for i in range(10, 21))
_CURVE_ROWS = 8


class Marks:
    """The characters of the page: drawing ones, or ASCII."""

    def __init__(self, ascii_only: bool) -> None:
        self.ascii_only = ascii_only
        self.bullet = "*" if ascii_only else "•"
        self.note = "-" if ascii_only else "·"
        self.full = "#" if ascii_only else "█"
        self.dot = "*" if ascii_only else "●"
        self.corner = "+" if ascii_only else "└"
        self.line = "-" if ascii_only else "─"
        self.wall = "|" if ascii_only else "│"
        self.parts = "WAGOK." if ascii_only else "█▓▒░▚·"

    def table(self, title: str | None = None) -> Table:
        """An open table."""
        return Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.ASCII2 if self.ascii_only else box.SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
            header_style="bold",
        )


def memory_bar(answer: SizeAnswer, marks: Marks) -> Iterable[Text]:
    """The memory of one GPU to scale, and its parts in numbers."""
    budget = answer.budget
    if budget is None:
        return
    inside = answer.rules.estimates_graphs
    spare = budget.total_bytes - budget.requested_bytes
    graphs = budget.graphs.value
    parts = [
        ("weights", budget.weights_bytes, "blue"),
        ("activations", budget.activation.value, "yellow"),
        ("CUDA graphs", graphs if inside else min(graphs, max(spare, 0)), "magenta"),
        ("other", budget.other.value, "red"),
        ("KV cache", max(0, budget.kv.value), "green"),
    ]
    free = budget.total_bytes - sum(n for _, n, _ in parts)
    parts.append(("not used", max(0, free), "bright_black"))
    columns = PAGE_COLUMNS - 2
    total = max(1, sum(n for _, n, _ in parts))
    yield Text(f"Memory of one GPU: {format_bytes(budget.total_bytes)}", style="bold")
    bar = Text(" ")
    drawn, so_far = 0, 0
    for (_, n_bytes, color), mark in zip(parts, marks.parts, strict=True):
        so_far += n_bytes
        upto = round(columns * so_far / total)
        bar.append(mark * (upto - drawn), style=color)
        drawn = upto
    yield bar
    ranges: dict[str, Range] = {
        "activations": budget.activation,
        "CUDA graphs": budget.graphs,
        "other": budget.other,
        "KV cache": budget.kv,
    }
    legend: list[Text] = []
    for (name, n_bytes, color), mark in zip(parts, marks.parts, strict=True):
        entry = Text(f" {mark} ", style=color)
        shown = ranges[name].value if name in ranges else n_bytes
        entry.append(f"{name} {shown / GIB:.2f}", style="default")
        if name in ranges:
            entry.append(f" ({ranges[name].low / GIB:.2f}..{ranges[name].high / GIB:.2f})", style="dim")
        legend.append(entry)
    for i in range(0, len(legend), 2):
        line = Text()
        for entry in legend[i : i + 2]:
            entry.pad_right(max(0, columns // 2 - len(entry)))
            line.append_text(entry)
        line.rstrip()
        yield line
    yield Text(f"   GiB; asked for {budget.requested_bytes / GIB:.2f}", style="dim")


def curve_lines(answer: SizeAnswer, marks: Marks) -> list[Text]:
    """Requests at once over the context of each, both on doubling scales."""
    capacity = answer.capacity
    if capacity is None or not capacity.pool.groups or capacity.usable_blocks < 1:
        return []
    limit = max(capacity.max_model_len, answer.request.model.shape.max_model_len or 0)
    contexts = [c for c in _CURVE_CONTEXTS if c <= limit] or [limit]
    counts = []
    for context in contexts:
        each = capacity.pool.blocks_per_request(context, answer.limits)
        counts.append(capacity.usable_blocks / each if each else 0.0)
    if max(counts) < 1:
        return []
    top = max(1, max(counts)).__ceil__().bit_length()
    step = -(-top // (_CURVE_ROWS - 1))  # doublings a row
    rows = -(-top // step) + 1
    levels = [round(log2(c) / step) if c >= 1 else -1 for c in counts]
    lines = [Text("Requests at once, by the context of each", style="bold")]
    column = 6
    for row in range(rows - 1, -1, -1):
        body = "".join((marks.dot if level == row else " ").center(column) for level in levels)
        lines.append(Text(f"{format_count(2 ** (row * step)):>7} {marks.wall}{body}".rstrip()))
    lines.append(Text(f"        {marks.corner}{marks.line * (column * len(contexts))}"))
    lines.append(Text("         " + "".join(_short(c).center(column) for c in contexts)))
    return lines


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K" if tokens >= 1024 else str(tokens)
