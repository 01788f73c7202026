"""Numbers as people read them at a glance: short, with their unit, and '-' for what is not known. Pure. Floor 3."""

import math

from kvctl.metrics.histogram import Quantile

MISSING = "-"


def count(value: float | None) -> str:
    """'12', '1,240', '3.5': a number of things."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"


def rate(value: float | None) -> str:
    """'812', '12.4', '0.33', '14.2k': per second, three figures."""
    if value is None or not math.isfinite(value):
        return MISSING
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    """'96%', '0.4%'."""
    if share is None or not math.isfinite(share):
        return MISSING
    return f"{share * 100:.1f}%" if 0 < abs(share) < 0.01 else f"{share * 100:.0f}%"


def tokens(value: float | None) -> str:
    """'57,344', '1.24M': a number of tokens."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value / 1e6:.3g}M" if abs(value) >= 1e6 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    """'12 ms', '1.91 s', '2m05': a duration in at most seven characters."""
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 119.5:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{int(value // 60)}m{int(value % 60):02d}"
    return f"{int(value // 3600)}h{int(value % 3600 // 60):02d}"


def bracket(quantile: Quantile | None, *, arrow: str = "..") -> str:
    """'0.25 .. 0.5 s', '>= 2560 s', '< 0.3 s': the bucket that a quantile lies in."""
    if quantile is None:
        return MISSING
    low, high = quantile.low, quantile.high
    if math.isinf(high):
        return f">= {_bound(low, low)}"
    if low <= 0:
        return f"< {_bound(high, high)}"
    return f"{_bound(low, high, unit=False)} {arrow} {_bound(high, high)}"


def clock(at_s: float) -> str:
    """'14:31:05', local time."""
    from time import localtime, strftime

    return strftime("%H:%M:%S", localtime(at_s))


def _bound(value: float, scale: float, *, unit: bool = True) -> str:
    """A bucket bound in ms or s, by the size of `scale`, so that both ends of a bracket have one unit."""
    if scale < 1:
        return f"{value * 1e3:.4g}" + (" ms" if unit else "")
    return f"{value:.4g}" + (" s" if unit else "")
