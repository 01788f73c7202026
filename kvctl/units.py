"""Bytes, seconds and rates as people write them: parse and format. The only place that rounds.

Knows nothing of what is measured. GiB = 2**30 bytes (what engines and drivers count in), GB = 10**9
(what datasheets count in); a bare number of bytes is taken as bytes. Floor 0.
"""

import math
import re

from kvctl.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_BYTE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_SECOND_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": KIB, "M": MIB, "G": GIB}
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*\Z")


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if match is None or not math.isfinite(float(match[1])):
        raise ConfigError(f"{text!r} is not {what}", hint=f"Write it like {example}.")
    return float(match[1]), match[2]


def parse_bytes(text: str) -> int:
    """Read '12.3GiB', '800MB', '4g' or '1024' as bytes.

    Raises:
        ConfigError: not a number of bytes, or a negative one.
    """
    number, unit = _split(text, "an amount of memory", "12.3GiB or 800MB")
    factor = _BYTE_UNITS.get(unit.lower())
    if factor is None or not 0 <= number * factor < math.inf:
        raise ConfigError(f"{text!r} is not an amount of memory", hint="Write it like 12.3GiB or 800MB.")
    return int(number * factor)


def parse_seconds(text: str) -> float:
    """Read '500ms', '1.5s', '2m' or '30' (seconds).

    Raises:
        ConfigError: not a duration, or a negative one.
    """
    number, unit = _split(text, "a duration", "500ms or 2m")
    factor = _SECOND_UNITS.get(unit.lower())
    if factor is None or number < 0:
        raise ConfigError(f"{text!r} is not a duration", hint="Write it like 500ms or 2m.")
    return number * factor


def parse_count(text: str) -> int:
    """Read '4096', '32k' (32,000) or '32K' (32,768), as vLLM's --max-model-len does.

    Raises:
        ConfigError: not a whole number.
    """
    number, unit = _split(text, "a whole number", "4096, 32k (32,000) or 32K (32,768)")
    factor = _COUNT_UNITS.get(unit)
    if factor is None or not (number * factor).is_integer():  # infinity is not
        raise ConfigError(f"{text!r} is not a whole number", hint="Write it like 4096, 32k (32,000) or 32K (32,768).")
    return int(number * factor)


def format_bytes(n_bytes: float) -> str:
    """'12.30 GiB', '56.0 KiB', '512 B': three or four significant figures, binary units."""
    size = abs(n_bytes)
    for factor, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            value = n_bytes / factor
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
            return f"{value:.{digits}f} {unit}"
    return f"{n_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """'3.52 ms', '1.20 s', '2 min 5 s': what a person reads at a look."""
    if seconds < 0:
        return "-" + format_seconds(-seconds)
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"


def format_count(number: float) -> str:
    """'57,000': a whole number with thousands separators."""
    return f"{number:,.0f}"
