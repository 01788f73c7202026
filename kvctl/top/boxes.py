"""Rectangles of styled text: a titled box, side by side, one above the other. Every line has its exact width. Pure.

Floor 3.
"""

from collections.abc import Sequence

from rich.text import Text

from kvctl.top.graph import Glyphs
from kvctl.top.look import Look

Block = list[Text]


def fit(text: Text, width: int) -> Text:
    """Return a copy cut or padded to exactly `width` cells."""
    copy = text.copy()
    copy.no_wrap, copy.end = True, ""
    if copy.cell_len > width:
        copy.truncate(width, overflow="crop")
    copy.pad_right(width - copy.cell_len)
    return copy


def blank(width: int) -> Text:
    """Return an empty line."""
    return Text(" " * width, no_wrap=True, end="")


def box(title: Text, lines: Sequence[Text], width: int, height: int, look: Look, *, style: str | None = None) -> Block:
    """Draw a frame of exactly `width` x `height` around the lines that fit in it."""
    frame = look.palette.rest if style is None else style
    top_left, across, top_right, down, low_left, low_right = _corners(look)
    inner = max(0, width - 4)
    shown = title.copy()
    if shown.cell_len > width - 6:
        shown.truncate(max(0, width - 6), overflow="crop")
    head = Text.assemble((f"{top_left}{across} ", frame), shown, no_wrap=True, end="")
    head.append(" " + across * max(0, width - head.cell_len - 2) + top_right, style=frame)
    block = [fit(head, width)]
    for index in range(height - 2):
        content = fit(lines[index], inner) if index < len(lines) else blank(inner)
        block.append(Text.assemble((f"{down} ", frame), content, (f" {down}", frame), no_wrap=True, end=""))
    bottom = low_left + across * max(0, width - 2) + low_right
    block.append(Text.assemble((bottom, frame), no_wrap=True, end=""))
    return block[:height]


def beside(*blocks: Block) -> Block:
    """Join blocks of equal height left to right."""
    return [Text.assemble(*rows, no_wrap=True, end="") for rows in zip(*blocks, strict=True)]


def ends(left: Text, right: Text, width: int) -> Text:
    """One line with something at each end; the left one gives way."""
    room = max(0, width - right.cell_len - 1)
    return fit(Text.assemble(fit(left, room), " ", right, no_wrap=True, end=""), width)


def _corners(look: Look) -> tuple[str, str, str, str, str, str]:
    if look.glyphs is Glyphs.ASCII:
        return "+", "-", "+", "|", "+", "+"
    return "╭", "─", "╮", "│", "╰", "╯"
