"""All engines in one table with a line for the fleet: filter, sort, and rows that fit the width. Pure. Floor 3."""

from collections.abc import Callable, Sequence
from enum import Enum

from rich.text import Text

from kvctl.top import words
from kvctl.top.lines import Part, line
from kvctl.top.look import Look
from kvctl.top.monitor import EngineView
from kvctl.top.verdict import Limit

_CALM = {Limit.UNKNOWN: 100.0, Limit.HEALTHY: 101.0, Limit.IDLE: 102.0}  # after every limit that binds
_SEVERITY = {limit: _CALM.get(limit, float(rank)) for rank, limit in enumerate(Limit)}


class SortKey(Enum):
    """What the rows are ordered by; `s` goes to the next."""

    NAME = "name"
    VERDICT = "verdict"
    WAITING = "waiting"
    KV = "kv"
    OUTPUT = "tok/s"

    def next(self) -> "SortKey":
        """Return the key after this one."""
        keys = list(SortKey)
        return keys[(keys.index(self) + 1) % len(keys)]


def arrange(views: Sequence[EngineView], sort: SortKey, pattern: str) -> list[EngineView]:
    """Return the rows whose address, model, engine, server or verdict contains `pattern`, in order."""
    wanted = pattern.lower()
    rows = [view for view in views if wanted in _searchable(view)]
    return sorted(rows, key=_order(sort))


def fleet_lines(views: Sequence[EngineView], width: int, look: Look) -> list[Text]:
    """One line: how many engines, and their sums; a sum over engines of which one does not say is '-'."""
    p = look.palette
    snapshots = [view.snapshot for view in views if view.snapshot is not None and not view.is_stale]
    down = sum(1 for view in views if view.is_stale)
    binding = sum(1 for view in views if view.verdict.limit.binds and not view.is_stale)
    parts: list[Part] = [("fleet ", p.title), (f"{len(views)} engines", p.value)]
    if down:
        parts.append((f"  {down} stale", p.bad))
    parts.append((f"  {binding} limited" if binding else "  none limited", p.bad if binding else p.good))
    parts += [("  run ", p.label), (words.count(_sum([s.running for s in snapshots])), p.value)]
    parts += [("  wait ", p.label), (words.count(_sum([s.waiting for s in snapshots])), p.value)]
    parts += [("  tok/s out ", p.label), (words.rate(_sum([s.generation_tokens_per_s for s in snapshots])), p.value)]
    parts += [(" in ", p.label), (words.rate(_sum([s.prompt_tokens_per_s for s in snapshots])), p.value)]
    used = _sum([s.kv_used_tokens for s in snapshots])
    capacity = _sum([None if s.kv_capacity_tokens is None else float(s.kv_capacity_tokens) for s in snapshots])
    if used is not None and capacity:
        parts += [("  KV ", p.label), (words.percent(used / capacity), p.value)]
        if width >= 100:
            parts.append((f" of {words.tokens(capacity)} tokens", p.label))
    return [line(*parts, width=width, look=look)]


def table_lines(
    views: Sequence[EngineView], width: int, look: Look, *, selected: int | None = None, max_rows: int | None = None
) -> list[Text]:
    """A heading and one row per engine; with `max_rows`, those around the selected one."""
    p = look.palette
    wide = width >= 110
    name_width = max(14, min(34, width - (78 if wide else 56)))
    heading = f"  {'':<2}{'endpoint':<{name_width}}{'run':>6}{'wait':>6}{'KV':>6}{'out/s':>8}"
    heading += f"{'in/s':>8}{'ttft':>9}{'hits':>6}" if wide else ""
    lines = [line((f"{heading}  limit", p.dim), width=width, look=look)]
    first = 0
    shown = list(views)
    if max_rows is not None and len(shown) > max_rows:
        first = min(max(0, (selected or 0) - max_rows // 2), len(shown) - max_rows)
        shown = shown[first : first + max_rows]
    for index, view in enumerate(shown, first):
        lines.append(_row(view, index, width, name_width, look, wide=wide, is_selected=index == selected))
    return lines


def _row(
    view: EngineView, index: int, width: int, name_width: int, look: Look, *, wide: bool, is_selected: bool
) -> Text:
    p = look.palette
    now = view.snapshot
    name = view.label if now is None or now.engine in ("0", "") else f"{view.label} #{now.engine}"
    if len(name) >= name_width:
        name = name[: name_width - 2] + look.cut
    number = str(index + 1) if index < 9 else " "
    cells = [
        f"{words.count(now.running if now else None):>6}",
        f"{words.count(now.waiting if now else None):>6}",
        f"{words.percent(now.kv_usage if now else None):>6}",
        f"{words.rate(now.generation_tokens_per_s if now else None):>8}",
    ]
    if wide:
        ttft = now.ttft_s.mean if now and now.ttft_s else None
        cells += [f"{words.rate(now.prompt_tokens_per_s if now else None):>8}", f"{words.seconds(ttft):>9}"]
        cells.append(f"{words.percent(now.prefix_hit_rate if now else None):>6}")
    style = p.dim if view.is_stale else p.value
    verdict = ("stale: " + (view.error or "")) if view.is_stale else view.verdict.limit.value
    limit_style = p.bad if view.is_stale else look.of(view.verdict.limit, view.verdict.finding.confidence)
    row = line(
        (f"{look.mark if is_selected else ' '} {number} ", p.calm),
        (f"{name:<{name_width}}", style),
        ("".join(cells), p.dim if view.is_stale else p.label),
        ("  ", ""),
        (verdict, limit_style),
        width=width,
        look=look,
    )
    if is_selected:
        row.pad_right(width - row.cell_len)
        row.stylize(p.selected)
    return row


def _searchable(view: EngineView) -> str:
    now = view.snapshot
    parts = [view.label, view.verdict.limit.value]
    if now is not None:
        parts += [now.model, now.engine, now.server.value]
    return " ".join(parts).lower()


def _order(sort: SortKey) -> Callable[[EngineView], tuple[float, str, str]]:
    def key(view: EngineView) -> tuple[float, str, str]:
        now = view.snapshot
        numbers = {
            SortKey.NAME: 0.0,
            SortKey.VERDICT: -1.0 if view.is_stale else _SEVERITY[view.verdict.limit],
            SortKey.WAITING: -(now.waiting or 0.0) if now else 0.0,
            SortKey.KV: -(now.kv_usage or 0.0) if now else 0.0,
            SortKey.OUTPUT: -(now.generation_tokens_per_s or 0.0) if now else 0.0,
        }
        return numbers[sort], view.label, now.engine if now else ""

    return key


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
