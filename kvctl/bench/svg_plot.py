"""Draws line plots as SVG text: axes with round ticks, linear or logarithmic, several series, limit lines. Pure.

Knows numbers and labels; nothing of benchmarks. Colors are CSS variables (`--series-1` ...) and classes, so the page
decides on light and dark; every line carries a <title>, which browsers show on hover. Floor 3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 44
NUM_COLORS = 6
_LOG_SPAN = 1e-9  # a logarithmic axis shows nine decades at most


@dataclass(frozen=True)
class Series:
    """Points in order of x; a y of None breaks the line. `color` counts from 1."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int = 1
    dashed: bool = False
    marks_points: bool = False


@dataclass(frozen=True)
class LimitLine:
    """A line across the plot: at a value of y, or (`vertical`) of x."""

    value: float
    label: str
    vertical: bool = False


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `low`/`high` None: from the data."""

    label: str
    is_log: bool = False
    low: float | None = None
    high: float | None = None


def line_plot(
    title: str,
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    limits: Sequence[LimitLine] = (),
    width: int = 640,
    height: int = 300,
) -> str:
    """One plot as an <svg> element; a note instead when there is nothing to draw."""
    series = [line for line in series if any(y is not None for _, y in line.points)]
    xs = [x for line in series for x, y in line.points if y is not None and (x > 0 or not x_axis.is_log)]
    ys = [y for line in series for x, y in line.points if y is not None and (y > 0 or not y_axis.is_log)]
    if not xs or not ys:
        return f'<p class="empty">{escape(title)}: no data</p>'
    xs += [limit.value for limit in limits if limit.vertical]
    ys += [limit.value for limit in limits if not limit.vertical]
    x_scale = _Scale(x_axis, xs, _LEFT, width - _RIGHT)
    y_scale = _Scale(y_axis, ys, height - _BOTTOM, _TOP)
    parts = [
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{_LEFT}" y="16">{escape(title)}</text>',
    ]
    for tick in y_scale.ticks():
        y = y_scale.at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick_label(tick)}</text>')
    for tick in x_scale.ticks():
        x = x_scale.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - _BOTTOM + 16}" text-anchor="middle">{tick_label(tick)}</text>'
        )
    middle_x, middle_y = (_LEFT + width - _RIGHT) / 2, (_TOP + height - _BOTTOM) / 2
    parts.append(
        f'<text class="label" x="{middle_x:.0f}" y="{height - 8}" text-anchor="middle">{escape(x_axis.label)}</text>'
    )
    parts.append(
        f'<text class="label" x="14" y="{middle_y:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle_y:.0f})">{escape(y_axis.label)}</text>'
    )
    for limit in limits:
        parts += _limit(limit, x_scale, y_scale, width, height)
    for line in series:
        parts += _line(line, x_scale, y_scale)
    parts += _legend(series, width)
    parts.append("</svg>")
    return "".join(parts)


class _Scale:
    """Maps values of an axis to pixels."""

    def __init__(self, axis: Axis, values: Sequence[float], start_px: float, end_px: float) -> None:
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        self._is_log = axis.is_log and low > 0
        if self._is_log:
            low = max(low, high * _LOG_SPAN)
        if high <= low:
            low, high = (low * 0.9, low * 1.1) if low > 0 else (low - 0.5, low + 0.5)
        if not self._is_log and axis.low is None and low > 0 and low < high * 0.5:
            low = 0.0
        if not self._is_log and axis.high is None:
            step = _round_step((high - low) / 5)
            high = math.ceil(high / step - 1e-9) * step
        self._low, self._high = low, high
        self._start_px, self._end_px = start_px, end_px

    def at(self, value: float) -> float:
        """The pixel of a value, within the axis."""
        if self._is_log:
            value = max(value, self._low * 0.999)
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        share = min(max(share, 0.0), 1.0)
        return self._start_px + share * (self._end_px - self._start_px)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if not self._is_log:
            step = _round_step((self._high - self._low) / 5)
            first = math.ceil(self._low / step - 1e-9)
            last = math.floor(self._high / step + 1e-9)
            return [i * step for i in range(first, last + 1)]
        decades = math.log10(self._high / self._low)
        digits = (1,) if decades > 4 else (1, 3) if decades > 2.5 else (1, 2, 5)
        exponents = range(math.floor(math.log10(self._low)), math.ceil(math.log10(self._high)) + 1)
        found = [d * 10.0**e for e in exponents for d in digits]
        found = [tick for tick in found if self._low * 0.999 <= tick <= self._high * 1.001]
        return found if len(found) >= 2 else [self._low, self._high]


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)


def tick_label(value: float) -> str:
    """'0', '0.05', '20', '1.5k', '2M'."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            scale = 1e3 if unit == "k" else factor
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def _line(line: Series, x_scale: _Scale, y_scale: _Scale) -> list[str]:
    pieces: list[list[str]] = [[]]
    for x, y in line.points:
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{x_scale.at(x):.1f},{y_scale.at(y):.1f}")
    color = (line.color - 1) % NUM_COLORS + 1
    style = f'class="line s{color}{" dashed" if line.dashed else ""}"'
    title = f"<title>{escape(line.name)}</title>"
    parts = [f'<polyline {style} points="{" ".join(piece)}">{title}</polyline>' for piece in pieces if len(piece) > 1]
    if line.marks_points or any(len(piece) == 1 for piece in pieces):
        for x, y in line.points:
            if y is not None:
                told = f"<title>{escape(line.name)}: {tick_label(x)}, {y:.4g}</title>"
                place = f'cx="{x_scale.at(x):.1f}" cy="{y_scale.at(y):.1f}"'
                parts.append(f'<circle class="dot s{color}" {place} r="3.5">{told}</circle>')
    return parts


def _limit(limit: LimitLine, x_scale: _Scale, y_scale: _Scale, width: int, height: int) -> list[str]:
    label = escape(limit.label)
    if limit.vertical:
        x = x_scale.at(limit.value)
        anchor = "end" if x > width / 2 else "start"
        shift = -4 if anchor == "end" else 4
        place = f'x="{x + shift:.1f}" y="{height - _BOTTOM - 6}" text-anchor="{anchor}"'
        return [
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>',
            f'<text class="limit-label" {place}>{label}</text>',
        ]
    y = y_scale.at(limit.value)
    return [
        f'<line class="limit" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>',
        f'<text class="limit-label" x="{_LEFT + 4}" y="{_limit_label_y(y):.1f}">{label}</text>',
    ]


def _limit_label_y(y: float) -> float:
    """Above the line, or below it where there is no room above."""
    return y + 14 if y < _TOP + 12 else y - 4


def _legend(series: Sequence[Series], width: int) -> list[str]:
    if len(series) < 2:
        return []
    parts = []
    x = float(width - _RIGHT)
    for line in reversed(series):
        x -= 6.6 * len(line.name) + 36
        color = (line.color - 1) % NUM_COLORS + 1
        dashed = " dashed" if line.dashed else ""
        parts.append(f'<line class="line s{color}{dashed}" x1="{x:.0f}" x2="{x + 16:.0f}" y1="24" y2="24"/>')
        parts.append(f'<text class="tick" x="{x + 20:.0f}" y="28">{escape(line.name)}</text>')
    return parts
