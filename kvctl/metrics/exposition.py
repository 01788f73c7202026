"""Reads a Prometheus text page: fast, and whatever the page holds.

Knows the text format (version 0.0.4, OpenMetrics' additions, quoted names of Prometheus 3) and nothing of what
the numbers mean. A line that is not a sample is counted and shown, never an exception; every limit that was hit
is said in the result. Values stay what the page says, NaN and infinities too: whoever shows them decides.
Label values are not cleaned here; use `printable` before a terminal sees one. Floor 0.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format, escaping, optional timestamp).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvctl.metrics.histogram import Histogram

MAX_PAGE_BYTES = 64 << 20
MAX_SERIES = 500_000
MAX_LINE_CHARS = 64 << 10
_REJECTED_SHOWN = 20
_MAX_REJECTED = 20_000
_LINES_PER_SERIES = 5  # comments and blank lines; more is no metrics page
_PIECE_CHARS = 1 << 20

# Possessive throughout: a hostile line is refused in time linear in its length.
_LABELS = r'\{((?:[^"{}]|"(?:[^"\\]|\\.)*+")*+)\}'
_SAMPLE = re.compile(
    rf"([a-zA-Z_:][\w:]*+)?(?:{_LABELS})?[ \t]*+([^\s#{{}}]++)(?:[ \t]++(-?[\d.]++))?[ \t\r]*+(?:#.*)?\Z", re.ASCII
)
_LABEL = re.compile(r'[ \t]*+([a-zA-Z_][\w]*+)[ \t]*+=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(?:,|\Z)', re.ASCII)
_QUOTED = re.compile(r'[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+(=[ \t]*+"((?:[^"\\]|\\.)*+)"[ \t]*+)?(?:,|\Z)')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}
_KINDS = frozenset(
    ("counter", "gauge", "histogram", "summary", "untyped", "unknown", "info", "stateset", "gaugehistogram")
)
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created", "_info", "_gcount", "_gsum")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


class Sample(NamedTuple):
    """One series at one moment. `labels` may be shared between samples: read it, never change it."""

    name: str
    labels: Mapping[str, str]
    value: float
    timestamp_ms: int | None = None


class RejectedLine(NamedTuple):
    """A line that is no sample: its number from 1, why, and its beginning."""

    number: int
    reason: str
    start: str


@dataclass(slots=True)
class Page:
    """Everything one scrape said. `series` maps a sample name (`x_total`, `y_bucket`) to its samples."""

    series: dict[str, list[Sample]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # family name -> type, only from '# TYPE'
    helps: dict[str, str] = field(default_factory=dict)
    num_series: int = 0
    num_rejected: int = 0
    rejected: list[RejectedLine] = field(default_factory=list)  # the first few
    truncated: str | None = None  # which limit cut the page off

    def samples(self, name: str, **labels: str) -> Iterator[Sample]:
        """Yield the samples of that exact name whose labels include the given ones."""
        for sample in self.series.get(name, ()):
            if all(sample.labels.get(key) == wanted for key, wanted in labels.items()):
                yield sample

    def value(self, name: str, **labels: str) -> float | None:
        """Sum the finite values of the matching samples; None where there is none (missing is not zero)."""
        values = [sample.value for sample in self.samples(name, **labels) if math.isfinite(sample.value)]
        return sum(values) if values else None

    def label(self, name: str, label: str) -> str | None:
        """Return the label's first value in that series, as an info metric carries it."""
        return next((s.labels[label] for s in self.series.get(name, ()) if label in s.labels), None)

    def histogram(self, name: str, **labels: str) -> Histogram | None:
        """Return the family's histogram, summed over the matching series; None where the page has none."""
        buckets: dict[float, float] = {}
        for sample in self.samples(f"{name}_bucket", **labels):
            bound = _number(sample.labels.get("le", ""))
            if bound is not None and not math.isnan(bound) and math.isfinite(sample.value):
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
        total = self.value(f"{name}_sum", **labels)
        count = self.value(f"{name}_count", **labels)
        if not buckets and count is None:
            return None
        bounds = tuple(sorted(buckets))
        return Histogram(bounds, tuple(buckets[bound] for bound in bounds), total, count)

    def family_of(self, name: str) -> str:
        """Return the family a sample name belongs to: `x` for `x_bucket` where the page declares `x`."""
        if name in self.kinds:
            return name
        for suffix in _SUFFIXES:
            if name.endswith(suffix) and name[: -len(suffix)] in self.kinds:
                return name[: -len(suffix)]
        return name


def parse_page(
    page: str | bytes, *, max_bytes: int = MAX_PAGE_BYTES, max_series: int = MAX_SERIES, prefixes: tuple[str, ...] = ()
) -> Page:
    """Read a page. With `prefixes`, series of other names are passed over unread (cheap on a large page)."""
    result = Page()
    if len(page) > max_bytes:
        page = page[: _end_of_last_line(page, max_bytes)]  # half a line may read as another number
        result.truncated = f"the page is larger than {max_bytes:,} bytes"
    text = page.decode("utf-8", errors="replace") if isinstance(page, bytes) else page
    series = result.series
    seen: set[str] = set()
    label_sets: dict[str, dict[str, str]] = {"": {}}
    for number, line in enumerate(_lines(text), 1):
        if number > max_series * _LINES_PER_SERIES:
            result.truncated = f"the page has more than {max_series * _LINES_PER_SERIES:,} lines"
            break
        if result.num_rejected > _MAX_REJECTED:
            result.truncated = f"the page has more than {_MAX_REJECTED:,} lines that are no samples"
            break
        if not line or line.isspace():
            continue
        if line[0] == "#":
            _read_comment(line, result)
            continue
        if prefixes and not line.startswith(prefixes):
            continue
        if len(line) > MAX_LINE_CHARS:
            _reject(result, number, f"longer than {MAX_LINE_CHARS:,} characters", line)
            continue
        match = _SAMPLE.match(line)
        if match is None:
            _reject(result, number, "not a sample", line)
            continue
        name, body, value_text, time_text = match.groups()
        value = _number(value_text)
        if value is None:
            _reject(result, number, "its value is not a number", line)
            continue
        labels = label_sets.get(body or "")
        if labels is None:
            labels = _read_labels(body)
            if labels is None:
                _reject(result, number, "its labels cannot be read", line)
                continue
            label_sets[body] = labels
        if name is None:
            name = labels.get("__name__")
            if not name:
                _reject(result, number, "it has no name", line)
                continue
        key = f"{name}{{{body}"
        if key in seen:
            _reject(result, number, "this series came before", line)
            continue
        if result.num_series >= max_series:
            result.truncated = f"the page has more than {max_series:,} series"
            break
        seen.add(key)
        sample = Sample(name, labels, value, _milliseconds(time_text) if time_text else None)
        known = series.get(name)
        if known is None:
            series[name] = [sample]
        else:
            known.append(sample)
        result.num_series += 1
    return result


def _end_of_last_line(page: str | bytes, limit: int) -> int:
    return page.rfind("\n", 0, limit) + 1 if isinstance(page, str) else page.rfind(b"\n", 0, limit) + 1


def printable(text: str, *, limit: int = 200) -> str:
    """Make a label value safe for a terminal: no control or direction characters, at most `limit` long."""
    clean = _UNPRINTABLE.sub("�", text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def _lines(text: str) -> Iterator[str]:
    """Split at newlines only, a piece at a time: the lines of a huge page would weigh several times the page."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS)
        end = len(text) if end < 0 else end
        yield from text[start:end].split("\n")
        start = end + 1


def _reject(page: Page, number: int, reason: str, line: str) -> None:
    page.num_rejected += 1
    if len(page.rejected) < _REJECTED_SHOWN:
        page.rejected.append(RejectedLine(number, reason, printable(line, limit=80)))


def _read_comment(line: str, page: Page) -> None:
    words = line[1:].split(None, 2)
    if len(words) == 3 and len(line) <= MAX_LINE_CHARS:
        keyword, name, rest = words
        if keyword == "TYPE":
            kind = rest.strip().lower()
            if kind in _KINDS:
                page.kinds.setdefault(name, kind)
        elif keyword == "HELP":
            page.helps.setdefault(name, rest.rstrip("\r"))


def _number(text: str) -> float | None:
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _milliseconds(text: str) -> int | None:
    """Read a timestamp: whole milliseconds, or OpenMetrics' seconds with a fraction."""
    number = _number(text)
    if number is None or not math.isfinite(number):
        return None
    return int(number * 1000) if "." in text else int(number)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda m: _ESCAPES.get(m[1], m[0]), text) if "\\" in text else text


def _read_labels(body: str) -> dict[str, str] | None:
    """Read the text between the braces; None where it is not a list of labels."""
    labels: dict[str, str] = {}
    position = 0
    end = len(body.rstrip())
    while position < end:
        match = _LABEL.match(body, position)
        if match is not None:
            labels[match[1]] = _unescape(match[2])
        else:
            match = _QUOTED.match(body, position)
            if match is None:
                return None
            if match[2] is None:
                labels["__name__"] = _unescape(match[1])
            else:
                labels[_unescape(match[1])] = _unescape(match[3])
        position = match.end()
    return labels
