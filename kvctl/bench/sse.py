"""Splits a byte stream into server-sent events, as the standard says and not as most servers happen to write.

Knows nothing of HTTP, JSON or time. A line ends with CR, LF or CRLF; comments, `event:`, `id:` and `retry:` are
passed over; several `data:` lines of one event are joined by LF; one space after the colon is dropped; input may be
cut at any byte. Every byte is looked at once, so a 1 MB event in 16 KB pieces costs no more than in one. Bytes of an
event that is unfinished when the stream ends are lost, as the standard says. Floor 3.

Source: WHATWG HTML, section 9.2.6 "Interpreting an event stream".
"""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseParser:
    """One stream's parser; `feed` returns the payloads that became complete."""

    __slots__ = ("_at_start", "_data_lines", "_partial_line", "_skip_line_feed")

    def __init__(self) -> None:
        self._partial_line: list[bytes] = []
        self._data_lines: list[bytes] = []
        self._skip_line_feed = False  # the last piece ended with CR: a LF that follows belongs to it
        self._at_start = True

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins an event, and not the first one."""
        return not (self._partial_line or self._data_lines or self._skip_line_feed or self._at_start)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the data of each event that is now complete, in order."""
        if (
            data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and not self._partial_line
            and not self._data_lines
            and b"\r" not in data
        ):
            self._at_start = self._skip_line_feed = False
            return [data[6:-2]]
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._skip_line_feed and data:
            if data.startswith(b"\n"):
                data = data[1:]
            self._skip_line_feed = False
        if not data:
            return []
        self._skip_line_feed = data.endswith(b"\r")
        lines = _LINE_END.split(data)
        last = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if self._partial_line:
                self._partial_line.append(line)
                line = b"".join(self._partial_line)
                self._partial_line.clear()
            self._take_line(line, events)
        if last:
            self._partial_line.append(last)
        return events

    def _take_line(self, line: bytes, events: list[bytes]) -> None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            if self._data_lines:
                events.append(b"\n".join(self._data_lines))
                self._data_lines.clear()
        elif line.startswith(b"data:"):
            start = 6 if line[5:6] == b" " else 5
            self._data_lines.append(line[start:])
        elif line == b"data":
            self._data_lines.append(b"")
