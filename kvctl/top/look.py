"""How it looks: colours for a dark or a light terminal or for none, and which characters it has. Pure. Floor 3."""

from dataclasses import dataclass

from kvctl.top.graph import Glyphs
from kvctl.top.verdict import Limit


@dataclass(frozen=True, slots=True)
class Palette:
    """Rich style strings by meaning. Empty: no style."""

    title: str
    label: str
    value: str
    dim: str
    good: str
    calm: str
    warn: str
    bad: str
    graph: str
    graph_alt: str
    rest: str
    selected: str
    good_banner: str
    calm_banner: str
    warn_banner: str
    bad_banner: str


DARK = Palette(
    title="bold #e6edf3",
    label="#8b949e",
    value="bold #e6edf3",
    dim="#6e7681",
    good="bold #3fb950",
    calm="bold #58a6ff",
    warn="bold #e3b341",
    bad="bold #ff7b72",
    graph="#39c5cf",
    graph_alt="#bc8cff",
    rest="#30363d",
    selected="on #1f2d3d",
    good_banner="bold #0d1117 on #3fb950",
    calm_banner="bold #0d1117 on #58a6ff",
    warn_banner="bold #0d1117 on #e3b341",
    bad_banner="bold #0d1117 on #ff7b72",
)
LIGHT = Palette(
    title="bold #1f2328",
    label="#57606a",
    value="bold #1f2328",
    dim="#6e7781",
    good="bold #1a7f37",
    calm="bold #0969da",
    warn="bold #9a6700",
    bad="bold #cf222e",
    graph="#0a7d8c",
    graph_alt="#8250df",
    rest="#d0d7de",
    selected="on #ddf4ff",
    good_banner="bold #ffffff on #1a7f37",
    calm_banner="bold #ffffff on #0969da",
    warn_banner="bold #ffffff on #9a6700",
    bad_banner="bold #ffffff on #cf222e",
)
PLAIN = Palette("bold", "", "bold", "", "", "", "bold", "bold", "", "", "", "reverse", *("bold reverse",) * 4)


@dataclass(frozen=True, slots=True)
class Look:
    """Everything a renderer needs to know about the terminal."""

    palette: Palette = DARK
    glyphs: Glyphs = Glyphs.BRAILLE

    @property
    def dot(self) -> str:
        """Return what stands between facts on one line."""
        return "-" if self.glyphs is Glyphs.ASCII else "·"

    @property
    def arrow(self) -> str:
        """Return what stands before an advice."""
        return "->" if self.glyphs is Glyphs.ASCII else "→"

    @property
    def cut(self) -> str:
        """Return what ends a text that was cut off."""
        return "~" if self.glyphs is Glyphs.ASCII else "…"

    @property
    def mark(self) -> str:
        """Return what stands before the selected row."""
        return ">" if self.glyphs is Glyphs.ASCII else "▶"

    def of(self, limit: Limit, confidence: float = 1.0) -> str:
        """Return the style of a verdict as text."""
        return getattr(self.palette, _mood(limit, confidence))  # type: ignore[no-any-return]

    def banner(self, limit: Limit, confidence: float = 1.0) -> str:
        """Return the style of a verdict as a banner."""
        return getattr(self.palette, f"{_mood(limit, confidence)}_banner")  # type: ignore[no-any-return]


def _mood(limit: Limit, confidence: float) -> str:
    if limit is Limit.HEALTHY:
        return "good"
    if limit is Limit.IDLE:
        return "calm"
    return "bad" if limit.binds and confidence >= 0.6 else "warn"
