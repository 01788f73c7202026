"""A session in a file: written as it happens, read back in order. Knows scrapes, not metrics.

One JSON object a line (gzip where the name ends in .gz), the first one a header. A page is stored as the lines that
differ from the endpoint's page before, since nine in ten stay the same. A file cut off in the middle of a line, by
a crash or a full disk, reads up to there. Floor 3.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from kvctl.errors import ConfigError
from kvctl.top.scrape import Scrape

_FORMAT = "kvctl-top-record"
_VERSION = 1
_HINT = "Give a file that `kvctl top --record` wrote."


class Recorder:
    """Writes scrapes to a file until closed."""

    def __init__(self, path: Path) -> None:
        """Open the file; an existing one is replaced.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            self._file = _open(path, "wt")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}", hint="Choose another file.") from None
        self._lines: dict[str, list[str]] = {}
        self._write({"format": _FORMAT, "version": _VERSION})

    def add(self, scrape: Scrape) -> None:
        """Write one scrape, and flush: what is written survives a crash."""
        entry: dict[str, Any] = {"at": round(scrape.at_s, 4), "url": scrape.url}
        if scrape.text is None:
            entry["error"] = scrape.error
        else:
            lines = scrape.text.split("\n")
            before = self._lines.get(scrape.url)
            if before is not None and len(before) == len(lines):
                pairs = zip(before, lines, strict=True)
                entry["changed"] = {str(i): now for i, (was, now) in enumerate(pairs) if was != now}
            else:
                entry["page"] = scrape.text
            self._lines[scrape.url] = lines
        self._write(entry)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n")
        self._file.flush()


def read_record(path: Path) -> Iterator[Scrape]:
    """Yield the scrapes of a recorded session, in order.

    Raises:
        ConfigError: no such file, or not a record.
    """
    try:
        file = _open(path, "rt")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint=_HINT) from None
    with file:
        yield from _read(file, path)


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")
    return path.open(mode, encoding="utf-8")


def _read(file: TextIO, path: Path) -> Iterator[Scrape]:
    pages: dict[str, list[str]] = {}
    lines = _entries(file, path)
    header = next(lines, {})
    if header.get("format") != _FORMAT:
        raise ConfigError(f"{path} is not a recorded session", hint=_HINT)
    if header.get("version") != _VERSION:
        raise ConfigError(f"{path} has version {header.get('version')}, this kvctl reads {_VERSION}", hint=_HINT)
    for number, entry in enumerate(lines, 2):
        try:
            url, at_s = str(entry["url"]), float(entry["at"])
            if "error" in entry:
                yield Scrape(url, at_s, None, str(entry["error"]))
                continue
            if "page" in entry:
                pages[url] = str(entry["page"]).split("\n")
            else:
                for index, line in entry["changed"].items():
                    pages[url][int(index)] = str(line)
            text = "\n".join(pages[url])
        except (KeyError, ValueError, TypeError, IndexError, AttributeError):
            raise ConfigError(f"{path} is damaged at line {number}", hint=_HINT) from None
        yield Scrape(url, at_s, text, None)


def _entries(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        for line in file:
            number += 1
            try:
                entry = json.loads(line)
            except ValueError:
                if not line.endswith("\n") and number > 1:
                    return  # cut off while it was written
                raise ConfigError(f"{path} is damaged at line {number}", hint=_HINT) from None
            if not isinstance(entry, dict):
                raise ConfigError(f"{path} is damaged at line {number}", hint=_HINT)
            yield entry
    except (EOFError, gzip.BadGzipFile, UnicodeDecodeError, OSError) as error:
        if isinstance(error, EOFError) and number > 1:
            return  # a gzip file whose end is missing
        raise ConfigError(f"{path} cannot be read as a record", hint=_HINT) from None
