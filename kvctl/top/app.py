"""The dashboard as a Textual application: keys in, frames out. Draws nothing itself; `frame` does.

Scrapes come from the source's threads into a queue; the event loop takes them out, at most once per tick, so that a
hundred endpoints cost one frame. Only lines that changed are drawn again. Floor 3.
"""

import asyncio
import contextvars
import queue
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.events import Key, Resize
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from kvctl.top.frame import Overlay, ViewState, frame, rows_of, selected_index
from kvctl.top.gpu import GpuReader
from kvctl.top.look import Look
from kvctl.top.monitor import Digest, FleetView, Monitor, digest_scrape
from kvctl.top.panels import PANELS
from kvctl.top.scrape import Scrape
from kvctl.top.sources import Source
from kvctl.top.timing import INTERVALS_S, MIN_INTERVAL_S, WINDOWS_S

_GATHER_S = 0.05  # scrapes that come together are drawn together
_GATHER_MANY_S = 0.25
_AGE_TICK_S = 1.0
EXIT_INTERRUPTED = 130


class FrameWidget(Widget):
    """Shows lines of styled text; a line that did not change is not drawn again. A new size calls `on_size`."""

    DEFAULT_CSS = "FrameWidget { width: 100%; height: 100%; background: ansi_default; color: ansi_default; }"

    def __init__(self, on_size: Callable[[], None]) -> None:
        super().__init__()
        self._on_size = on_size
        self._lines: list[Text] = []
        self._strips: list[Strip] = []

    def on_resize(self, _event: Resize) -> None:
        """Ask for a frame of the new size."""
        self._on_size()

    def show(self, lines: list[Text]) -> None:
        """Take the next frame."""
        console = self.app.console
        old = self._lines
        strips = self._strips if len(old) == len(lines) else [Strip.blank(0)] * len(lines)
        changed = []
        for index, one in enumerate(lines):
            if len(old) == len(lines) and one == old[index]:
                continue
            strips[index] = Strip(list(one.render(console)), one.cell_len)
            changed.append(index)
        self._lines, self._strips = lines, strips
        if len(changed) > len(lines) // 2:
            self.refresh()
        elif changed:
            self.refresh(*(Region(0, index, self.size.width, 1) for index in changed))

    def render_line(self, y: int) -> Strip:
        """Give Textual one line."""
        if y < len(self._strips):
            return self._strips[y].adjust_cell_length(self.size.width)
        return Strip.blank(self.size.width)

    @property
    def plain(self) -> str:
        """The frame as plain text."""
        return "\n".join(line.plain for line in self._lines)


class TopApp(App[None]):
    """The event loop around a source, a monitor and the frame."""

    ENABLE_COMMAND_PALETTE = False
    INLINE_PADDING = 0
    CSS = "Screen { background: ansi_default; }"
    BINDINGS: ClassVar = []

    def __init__(
        self,
        source: Source,
        look: Look,
        state: ViewState,
        *,
        gpu_reader: GpuReader | None = None,
        on_scrape: Callable[[Scrape], None] | None = None,
    ) -> None:
        super().__init__(ansi_color=True)
        self.source = source
        self.state = state
        self.look = look
        self.monitor = Monitor(dict(source.labels), state.interval_s)
        self.fleet = FleetView(source.now_s(), state.window_s, ())
        self._gpu_reader = gpu_reader
        self._on_scrape = on_scrape
        self._inbox: queue.SimpleQueue[tuple[Scrape, Digest]] = queue.SimpleQueue()
        self._frame = FrameWidget(self.redraw)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._call_context: contextvars.Context | None = None  # Textual's timers look up the application in it
        self._is_due = False
        self._gpus_read_s = 0.0

    def compose(self) -> ComposeResult:
        """Textual's way to ask for the widgets: one."""
        yield self._frame

    def on_mount(self) -> None:
        """Start the source once the screen is there."""
        self._event_loop, self._call_context = asyncio.get_running_loop(), contextvars.copy_context()
        self.set_interval(_AGE_TICK_S, self._tick)
        self.source.start(self._deliver)

    def on_unmount(self) -> None:
        """Stop the source when the screen goes."""
        self.source.stop()

    # ---- scrapes ----

    def _deliver(self, scrape: Scrape) -> None:
        """Called from the source's threads; the page is read there, so that a huge one holds up no key."""
        self._inbox.put((scrape, digest_scrape(scrape)))
        loop = self._event_loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._schedule, context=self._call_context)
            except RuntimeError:
                return  # the loop has closed in between: the application is ending

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            delay_s = 0.0
            if self.fleet.engines:  # the first answer is shown at once
                delay_s = _GATHER_S if len(self.fleet.engines) == 1 else min(_GATHER_MANY_S, self.state.interval_s / 4)
            self.set_timer(delay_s, self._take) if delay_s else self.call_later(self._take)

    def _take(self) -> None:
        self._is_due = False
        while True:
            try:
                scrape, digest = self._inbox.get_nowait()
            except queue.Empty:
                break
            self.monitor.take(digest)
            if self._on_scrape is not None:
                self._on_scrape(scrape)
        now_s = self.source.now_s()
        if self._gpu_reader is not None and now_s - self._gpus_read_s >= self.state.interval_s * 0.9:
            self._gpus_read_s = now_s
            self.state.gpus = self._gpu_reader.read()
        self.redraw()

    def _tick(self) -> None:
        """Let ages grow where nothing comes in."""
        if any(view.is_stale or view.age_s is None for view in self.fleet.engines) or self._is_late():
            self.redraw()

    def _is_late(self) -> bool:
        ages = [view.age_s for view in self.fleet.engines if view.age_s is not None]
        late_s = 2 * max(self.state.interval_s, _AGE_TICK_S)
        return not self.state.is_paused and self.source.now_s() - self.fleet.at_s > late_s and bool(ages)

    def redraw(self) -> None:
        """Make a view of now and show it."""
        state = self.state
        if not state.is_paused:
            self.fleet = self.monitor.view(self.source.now_s(), state.window_s, summed=state.summed)
        size = self._frame.size
        if size.width and size.height:
            self._frame.show(frame(self.fleet, state, size.width, size.height, self.look))

    # ---- keys ----

    async def on_key(self, event: Key) -> None:
        """Every key of the dashboard."""
        event.stop()
        event.prevent_default()
        if self.state.is_typing:
            self._type(event)
        elif event.key in ("q", "ctrl+q"):
            self.exit()
            return
        elif event.key == "ctrl+c":
            self.interrupt()
            return
        else:
            self._act(event)
        self.redraw()

    def interrupt(self) -> None:
        """Leave as after Ctrl-C."""
        self.exit(return_code=EXIT_INTERRUPTED)

    async def action_quit(self) -> None:
        """Textual's own quit key."""
        self.exit()

    def _type(self, event: Key) -> None:
        state = self.state
        if event.key == "enter":
            state.is_typing = False
        elif event.key == "escape":
            state.is_typing, state.pattern = False, ""
        elif event.key == "backspace":
            state.pattern = state.pattern[:-1]
        elif event.character and event.character.isprintable() and len(state.pattern) < 60:
            state.pattern += event.character

    def _act(self, event: Key) -> None:
        state, key = self.state, event.key
        rows = rows_of(self.fleet, state)
        has_many = len(self.fleet.engines) > 1
        if key in ("question_mark", "h"):
            self._toggle(Overlay.HELP)
        elif key == "e":
            self._toggle(Overlay.EXPLAIN)
        elif key == "escape":
            self._back()
        elif key in ("up", "k", "down", "j", "pageup", "pagedown"):
            step = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10}[key]
            if state.overlay is not Overlay.NONE:
                state.scroll = max(0, state.scroll + step)
            elif rows:
                index = min(max(0, selected_index(rows, state) + step), len(rows) - 1)
                state.selected = rows[index].key
        elif key == "w":
            state.window_s = WINDOWS_S[(WINDOWS_S.index(state.window_s) + 1) % len(WINDOWS_S)]
        elif key in ("plus", "equals_sign", "minus"):
            self._change_interval(-1 if key == "minus" else 1)
        elif key in ("space", "p"):
            state.is_paused = not state.is_paused
            self.source.set_paused(state.is_paused)
        elif key == "s":
            state.sort = state.sort.next()
        elif key == "slash":
            state.is_typing, state.is_detail = True, False
        elif key == "enter" and has_many:
            state.selected = rows[selected_index(rows, state)].key if rows else None
            state.is_detail = not state.is_detail
            state.zoom = None
        elif key == "a":
            state.summed, state.selected = not state.summed, None
        elif key == "r":
            self.refresh(layout=True)
        elif key.isdigit() and key != "0":
            self._digit(int(key), has_many and not state.is_detail)

    def _digit(self, number: int, selects_row: bool) -> None:
        rows = rows_of(self.fleet, self.state)
        if selects_row:
            if number <= len(rows):
                self.state.selected = rows[number - 1].key
        elif number <= len(PANELS):
            self.state.zoom = None if self.state.zoom == number - 1 else number - 1

    def _toggle(self, overlay: Overlay) -> None:
        self.state.overlay = Overlay.NONE if self.state.overlay is overlay else overlay
        self.state.scroll = 0

    def _back(self) -> None:
        """Leave the innermost thing: overlay, large panel, details, filter; then, as in nvitop, the program."""
        state = self.state
        if state.overlay is not Overlay.NONE:
            state.overlay = Overlay.NONE
        elif state.zoom is not None:
            state.zoom = None
        elif state.is_detail:
            state.is_detail = False
        elif state.pattern:
            state.pattern = ""

    def _change_interval(self, direction: int) -> None:
        """`+` makes the interval longer, `-` shorter."""
        state = self.state
        if direction > 0:
            state.interval_s = next((one for one in INTERVALS_S if one > state.interval_s), state.interval_s)
        else:
            shorter = [one for one in INTERVALS_S if one < state.interval_s]
            state.interval_s = max(shorter[-1] if shorter else state.interval_s, MIN_INTERVAL_S)
        self.source.set_interval(state.interval_s)
