"""History as characters: braille dots (two values and four levels a cell), blocks, or plain ASCII. Pure.

The newest value is at the right edge. A missing value leaves a gap, so that an outage does not look like a zero.
Floor 3.
"""

from collections.abc import Sequence
from enum import Enum

Values = Sequence[float | None]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LEFT_DOTS = (0x40, 0x04, 0x02, 0x01)  # from the bottom up
_RIGHT_DOTS = (0x80, 0x20, 0x10, 0x08)
_BRAILLE = 0x2800


class Glyphs(Enum):
    """Which characters the terminal can show."""

    BRAILLE = "braille"
    BLOCK = "block"
    ASCII = "ascii"


def draw(
    values: Values, width: int, height: int, *, top: float | None = None, glyphs: Glyphs = Glyphs.BRAILLE
) -> list[str]:
    """Draw the newest values as `height` lines of `width` characters, filled from the bottom.

    `top` is the value at full height; None takes the largest one shown. A value above zero shows at least one dot.
    """
    if width < 1 or height < 1:
        return []
    per_cell = 2 if glyphs is Glyphs.BRAILLE else 1
    shown: list[float | None] = [None] * max(0, width * per_cell - len(values))
    shown += values[-width * per_cell :]
    highest = top if top is not None else max((v for v in shown if v is not None), default=0.0)
    steps_per_line = 4 if glyphs is Glyphs.BRAILLE else 8 if glyphs is Glyphs.BLOCK else 2
    levels = [_level(value, highest, height * steps_per_line) for value in shown]
    lines = []
    for row in range(height - 1, -1, -1):
        base = row * steps_per_line
        if glyphs is Glyphs.BRAILLE:
            pairs = zip(levels[::2], levels[1::2], strict=True)
            lines.append("".join(_braille(left - base, right - base) for left, right in pairs))
        elif glyphs is Glyphs.BLOCK:
            lines.append("".join(_BLOCKS[min(8, max(0, level - base))] for level in levels))
        else:
            lines.append("".join(" .#"[min(2, max(0, level - base))] for level in levels))
    return lines


def bar(share: float | None, width: int, *, glyphs: Glyphs = Glyphs.BRAILLE) -> tuple[str, str]:
    """Return a bar of `width` as (filled, rest)."""
    if width < 1:
        return "", ""
    filled = 0 if share is None else round(min(1.0, max(0.0, share)) * width)
    if share and not filled:
        filled = 1
    full, rest = ("#", "-") if glyphs is Glyphs.ASCII else ("█", "░")
    return full * filled, rest * (width - filled)


def _level(value: float | None, highest: float, steps: int) -> int:
    if value is None or highest <= 0 or value <= 0:
        return 0
    return max(1, min(steps, round(value / highest * steps)))


def _braille(left: int, right: int) -> str:
    dots = 0
    for level, marks in ((left, _LEFT_DOTS), (right, _RIGHT_DOTS)):
        for mark in marks[: max(0, min(4, level))]:
            dots |= mark
    return chr(_BRAILLE + dots) if dots else " "
