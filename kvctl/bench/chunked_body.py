"""Takes the framing off a chunked HTTP/1.1 body, cut at any byte. Knows nothing of headers or of what is inside.

It exists beside httptools because a stream of events is a chunk per event: the usual read, one whole chunk, is seen by
its caller without a call (`is_between`), and everything else ends up here. Floor 3.

Source: RFC 9112, section 7.1 (chunk size in hex, extensions after a semicolon, trailers after the chunk of size 0).
"""

_HEX_DIGITS = b"0123456789abcdefABCDEF"
_MAX_DIGITS = 15
_MAX_LINE_BYTES = 16 * 1024


class BadChunk(Exception):
    """The body is not framed as chunks."""


class ChunkedBody:
    """One body; `feed` returns the pieces of content that came."""

    __slots__ = ("_ends_chunk", "_in_trailers", "_left", "_line", "is_complete")

    def __init__(self) -> None:
        self._left = 0  # bytes of the chunk under way
        self._ends_chunk = False  # its content is whole, the line end behind it is not in yet
        self._in_trailers = False
        self._line = b""  # the beginning of a line whose end is not in yet
        self.is_complete = False

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a chunk."""
        return not (self._left or self._ends_chunk or self._in_trailers or self._line or self.is_complete)

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; what follows the end of the body is ignored.

        Raises:
            BadChunk: a size that is none, or content of another length than its size.
        """
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.is_complete:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    if data.startswith(b"\r\n", at):
                        at += 2
                    else:
                        self._ends_chunk = True
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > _MAX_LINE_BYTES:
                    raise BadChunk(f"a line of over {_MAX_LINE_BYTES} bytes where the size of a chunk should be")
                break
            self._take_line((self._line + data[at:end]).removesuffix(b"\r"))
            self._line = b""
            at = end + 1
        return pieces

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            self.is_complete = not line
        elif self._ends_chunk:
            if line:
                raise BadChunk(f"a chunk is longer than its size says: {line[:40]!r}")
            self._ends_chunk = False
        else:
            digits = line.partition(b";")[0].rstrip(b" \t")
            if not 0 < len(digits) <= _MAX_DIGITS or digits.strip(_HEX_DIGITS):
                raise BadChunk(f"{line[:40]!r} is no size of a chunk")
            self._left = int(digits, 16)
            self._in_trailers = not self._left
