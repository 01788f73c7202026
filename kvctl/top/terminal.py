"""What the terminal can show, from the options and its encoding. Pure. Floor 3."""

from kvctl.top.graph import Glyphs
from kvctl.top.look import DARK, LIGHT, PLAIN, Look


def choose_look(*, ascii_only: bool, blocks: bool, light: bool, plain: bool, encoding: str | None) -> Look:
    """Return the look: an encoding without block characters means ASCII, whatever was asked."""
    glyphs = Glyphs.BLOCK if blocks else Glyphs.BRAILLE
    if ascii_only or not _can_show("⣿█…→", encoding):
        glyphs = Glyphs.ASCII
    return Look(PLAIN if plain else LIGHT if light else DARK, glyphs)


def _can_show(characters: str, encoding: str | None) -> bool:
    try:
        characters.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
