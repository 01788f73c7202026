"""A help page whose flag names are never cut: what a command with many long flags needs at 80 columns.

Typer's own page gives flags a quarter of the width and shortens them, which for a server's flags leaves names that
nobody can type. Knows no command. Floor 4.
"""

from enum import Enum
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperArgument, TyperCommand, TyperOption

_BORDERS = 4


class HelpPageCommand(TyperCommand):
    """A command that prints its options in panels: flags in full on the left, what they do on the right."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page."""
        console = Console(highlight=False)
        console.print()
        console.print(Text(f" {self.get_usage(ctx)}", style="bold"))
        console.print()
        console.print(Text(f" {(self.help or '').strip()}"))
        console.print()
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False):
                continue
            if isinstance(param, TyperArgument):
                panels.setdefault("Arguments", []).append((param.metavar or param.name or "", param.help or ""))
            elif isinstance(param, TyperOption):
                panel = getattr(param, "rich_help_panel", None) or "Options"
                panels.setdefault(panel, []).append((_flags(param), _explanation(param, ctx)))
            else:
                panels.setdefault("Options", []).append((", ".join(param.opts), getattr(param, "help", "") or ""))
        for title, rows in panels.items():
            console.print(_panel(title, rows, console.width))


def _panel(title: str, rows: list[tuple[str, str]], width: int) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1, min_width=min(24, width - _BORDERS))
    for flags, explanation in rows:
        table.add_row(Text(flags), Text(explanation))
    return Panel(table, title=title, title_align="left", box=box.ROUNDED, border_style="dim")


def _flags(option: TyperOption) -> str:
    """'--port INTEGER', or '--[no-]enable-x' for a switch."""
    names = [name for name in option.opts if name.startswith("--")] or list(option.opts)
    if option.secondary_opts:
        return names[0].replace("--", "--[no-]", 1)
    if option.is_flag:
        return names[0]
    return f"{names[0]} {option.metavar or _kind(option.default)}"


def _kind(default: object) -> str:
    """A placeholder for an option that names none: made from its default, which every typer version has."""
    if isinstance(default, Enum):
        return "|".join(str(choice.value) for choice in type(default))
    return "N" if isinstance(default, int) else "X" if isinstance(default, float) else "TEXT"


def _explanation(option: TyperOption, ctx: Any) -> str:
    text = option.help or ""
    default = option.get_default(ctx)
    if isinstance(default, Enum):
        default = default.value
    notes = []
    if option.is_flag and option.secondary_opts and default is True:
        notes.append("default: on")
    elif option.show_default is not False and not option.is_flag and default not in (None, "", ()):
        notes.append(f"default: {default:g}" if isinstance(default, float) else f"default: {default}")
    if option.envvar:
        names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar)
        notes.append(f"env: {', '.join(names)}")
    return f"{text} [{'; '.join(notes)}]" if notes else text
