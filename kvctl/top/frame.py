"""The whole screen as lines: one pure function of what is known, what the user chose, and the terminal's size.

Every frame has exactly `height` lines of exactly `width` cells. Floor 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from rich.text import Text

from kvctl.top import words
from kvctl.top.boxes import Block, beside, blank, box, ends, fit
from kvctl.top.fleet_table import SortKey, arrange, fleet_lines, table_lines
from kvctl.top.gpu import GpuReading
from kvctl.top.help_text import help_lines
from kvctl.top.lines import explain_lines, gpu_lines, line
from kvctl.top.look import Look
from kvctl.top.monitor import EngineView, FleetView
from kvctl.top.panels import PANELS, latency_panel, verdict_panel

MIN_WIDTH, MIN_HEIGHT = 40, 12


class Overlay(Enum):
    """What covers the screen."""

    NONE = "none"
    HELP = "help"
    EXPLAIN = "explain"


@dataclass(slots=True)
class ViewState:
    """What the user chose."""

    window_s: float
    interval_s: float
    source: str = "live"
    is_paused: bool = False
    sort: SortKey = SortKey.VERDICT
    pattern: str = ""
    is_typing: bool = False  # the filter
    selected: tuple[str, str, str] | None = None  # an EngineView.key
    is_detail: bool = False  # one engine only, though there are several
    zoom: int | None = None  # index of the one panel shown
    overlay: Overlay = Overlay.NONE
    scroll: int = 0
    summed: bool = False
    gpus: tuple[GpuReading, ...] = field(default=())


def rows_of(fleet: FleetView, state: ViewState) -> list[EngineView]:
    """Return the rows of the table as filtered and sorted."""
    return arrange(fleet.engines, state.sort, state.pattern)


def selected_index(rows: Sequence[EngineView], state: ViewState) -> int:
    """Return which row is selected; the first where the selected engine is gone."""
    return next((index for index, view in enumerate(rows) if view.key == state.selected), 0)


def frame(fleet: FleetView, state: ViewState, width: int, height: int, look: Look) -> Block:
    """Draw the screen."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        text = f"kvctl top needs {MIN_WIDTH}x{MIN_HEIGHT}, this terminal is {width}x{height}"
        return _filled([Text(text)], width, height)
    rows = rows_of(fleet, state)
    index = selected_index(rows, state)
    view = rows[index] if rows else None
    header = _header(fleet, view, state, width, look)
    footer = _footer(fleet, state, width, look)
    body_height = height - 2
    if state.overlay is not Overlay.NONE:
        body = _overlay(view, state, width, body_height, look)
    elif view is None:
        text = f"no engine matches '{state.pattern}'" if fleet.engines else "waiting for the first answer"
        body = [Text(""), line((f"  {text}", look.palette.warn), width=width, look=look)]
    else:
        body = _body(fleet, rows, index, state, width, body_height, look)
    return [header, *_filled(body, width, body_height), footer]


def _body(
    fleet: FleetView, rows: Sequence[EngineView], index: int, state: ViewState, width: int, height: int, look: Look
) -> Block:
    view = rows[index]
    body: Block = []
    if len(fleet.engines) > 1 and not state.is_detail and state.zoom is None:
        most = max(2, min(len(rows), height // 4))
        body += fleet_lines(rows, width, look)
        body += table_lines(rows, width, look, selected=index, max_rows=most)
    gpus = gpu_lines(state.gpus, width, look)[: max(0, height // 8)]
    body += gpus
    left = height - len(body)
    verdict_height = min(_verdict_height(left), left)
    body += verdict_panel(view, width, verdict_height, look)
    left -= verdict_height
    if state.zoom is not None:
        return body + PANELS[state.zoom](view, width, left, look)
    return body + _panels(view, width, left, look)


def _verdict_height(left: int) -> int:
    """The verdict's share: the same for every verdict, so that the screen does not jump."""
    return 8 if left <= 30 else 10


def _panels(view: EngineView, width: int, height: int, look: Look) -> Block:
    """The four panels in a grid that fits."""
    requests, kv, tokens, latency = PANELS
    if height < 5:
        return []
    if height < 9 and width < 120:  # no room for two rows
        half = width // 2
        return beside(requests(view, half, height, look), kv(view, width - half, height, look))
    if width >= 150 and height >= 24:
        third = width // 3
        low = min(height // 2, 18)
        top = beside(
            requests(view, third, height - low, look),
            kv(view, third, height - low, look),
            tokens(view, width - 2 * third, height - low, look),
        )
        return top + latency_panel(view, width, low, look)
    upper = height // 2
    lower = height - upper
    half, wide = width // 2, max(width // 2, min(46, width - 30))
    return [
        *beside(requests(view, half, upper, look), kv(view, width - half, upper, look)),
        *beside(tokens(view, width - wide, lower, look), latency(view, wide, lower, look)),
    ]


def _overlay(view: EngineView | None, state: ViewState, width: int, height: int, look: Look) -> Block:
    inner = width - 4
    if state.overlay is Overlay.HELP or view is None:
        name, lines = "Help", help_lines(inner, look)
    else:
        name, lines = "Verdict explained", explain_lines(view, inner, look)
    start = max(0, min(state.scroll, len(lines) - (height - 2)))
    more = "  more below" if len(lines) - start > height - 2 else ""
    title = line((name, look.palette.title), (more, look.palette.warn), width=inner, look=look)
    return box(title, lines[start : start + height - 2], width, height, look)


def _header(fleet: FleetView, view: EngineView | None, state: ViewState, width: int, look: Look) -> Text:
    p = look.palette
    facts = []
    if view is not None:
        now = view.snapshot
        facts = [view.label]
        if now is not None:
            facts += [now.server.value, now.model, f"engine {now.engine}" if now.engine not in ("0", "") else ""]
    joined = f" {look.dot} ".join(fact for fact in facts if fact)
    left = line((" kvctl top ", p.calm_banner), (f" {joined}", p.title), width=width, look=look)
    states = [state.source, f"window {state.window_s:g} s", f"every {state.interval_s:g} s", words.clock(fleet.at_s)]
    right = Text(no_wrap=True, end="")
    if state.is_paused:
        right.append(" PAUSED ", style=p.warn_banner)
        right.append(" ")
    right.append(f" {look.dot} ".join(states), style=p.dim)
    return ends(left, right, width)


def _footer(fleet: FleetView, state: ViewState, width: int, look: Look) -> Text:
    p = look.palette
    if state.is_typing:
        cursor = "_" if look.dot == "-" else "▏"
        return fit(
            line(
                ("filter: ", p.calm),
                (state.pattern + cursor, p.value),
                ("  Enter keeps, Esc clears", p.dim),
                width=width,
                look=look,
            ),
            width,
        )
    if state.overlay is not Overlay.NONE:
        keys = [("Esc", "back"), ("Up Down", "scroll"), ("q", "quit")]
    else:
        keys = [("q", "quit"), ("?", "help"), ("e", "explain"), ("w", "window"), ("+-", "interval"), ("space", "pause")]
        if len(fleet.engines) > 1:
            keys += [("s", f"sort {state.sort.value}"), ("/", state.pattern or "filter"), ("Enter", "details")]
        else:
            keys += [("1-4", "panel")]
    parts = []
    for key, what in keys:
        parts += [(f" {key}", p.calm), (f" {what} ", p.dim)]
    return fit(line(*parts, width=width, look=look), width)


def _filled(lines: Sequence[Text], width: int, height: int) -> Block:
    rows = [fit(one, width) for one in lines[:height]]
    return rows + [blank(width)] * (height - len(rows))
