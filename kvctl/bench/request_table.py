"""What is kept of every request: one row of numbers, some 100 bytes, in a temporary file once there are thousands.

Rows hold moments (perf_counter seconds) and counts; latencies are derived from them by `metrics.timeline`, the one
definition. Knows nothing of HTTP. Floor 3.
"""

import contextlib
import struct
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from kvctl.metrics.timeline import RequestTimeline


@dataclass(slots=True)
class RequestRow:
    """One request. 0.0 for a moment that never came; -1 for a count that the server did not tell."""

    number: int  # counts the requests of a run
    class_name: str
    error_kind: str  # "" when completed
    due_s: float
    sent_s: float
    first_s: float
    first_answer_s: float
    last_s: float
    end_s: float
    connect_s: float
    place_wait_s: float  # under a cap on requests in flight
    max_gap_s: float
    output_tokens: float  # as told by usage, else the number of events
    first_event_tokens: float
    num_events: int
    prompt_tokens: int
    cached_tokens: int
    asked_prompt_tokens: int
    asked_output_tokens: int
    reasoning_events: int
    coalesced_events: int

    @property
    def is_completed(self) -> bool:
        """Whether the answer came whole."""
        return not self.error_kind

    def timeline(self, *, from_due: bool = False) -> RequestTimeline:
        """The request's moments as the shared definition takes them: from sent, or from due."""
        return RequestTimeline(
            arrival_s=self.due_s if from_due else self.sent_s,
            first_token_s=self.first_s or None,
            last_token_s=self.last_s or None,
            num_output_tokens=round(self.output_tokens),
            num_first_tokens=self.first_event_tokens,
        )

    def latencies_s(self) -> dict[str, float | None]:
        """ttft, ttft_due, ttfo, tpot, e2e, max_gap; None for what does not exist."""
        timeline = self.timeline()
        return {
            "ttft": timeline.ttft_s,
            "ttft_due": self.timeline(from_due=True).ttft_s,
            "ttfo": self.first_answer_s - self.sent_s if self.first_answer_s else None,
            "tpot": timeline.tpot_s,
            "e2e": timeline.e2e_s,
            "max_gap": self.max_gap_s if self.num_events > 1 else None,
        }


_RECORD = struct.Struct("=iHH6d5f7i")  # RequestRow's fields in order, the two names as numbers
_pack, _iter_unpack = _RECORD.pack, _RECORD.iter_unpack
_CHUNK_ROWS = 8192
_CHUNK_BYTES = _CHUNK_ROWS * _RECORD.size


class RequestTable:
    """Rows as records; all but the last few thousand in a temporary file, so that memory does not grow.

    Where no such file can be written they stay in memory: nothing is lost for want of a disk.
    """

    def __init__(self) -> None:
        self._records = bytearray()
        self._names: dict[str, int] = {}  # distinct class names and error kinds
        self._classes: set[str] = set()
        self._file: BinaryIO | None = None
        self._num_in_file = 0  # chunks
        self._in_memory: list[bytes] = []  # chunks that no file took; they follow those in the file

    def __len__(self) -> int:
        return (self._num_in_file + len(self._in_memory)) * _CHUNK_ROWS + len(self._records) // _RECORD.size

    @property
    def num_classes(self) -> int:
        """How many kinds of requests there are."""
        return len(self._classes)

    def append(self, row: RequestRow) -> None:
        """Add one row."""
        self._classes.add(row.class_name)
        self._records += _pack(
            row.number,
            self._names.setdefault(row.class_name, len(self._names)),
            self._names.setdefault(row.error_kind, len(self._names)),
            row.due_s,
            row.sent_s,
            row.first_s,
            row.first_answer_s,
            row.last_s,
            row.end_s,
            row.connect_s,
            row.place_wait_s,
            row.max_gap_s,
            row.output_tokens,
            row.first_event_tokens,
            row.num_events,
            row.prompt_tokens,
            row.cached_tokens,
            row.asked_prompt_tokens,
            row.asked_output_tokens,
            row.reasoning_events,
            row.coalesced_events,
        )
        if len(self._records) == _CHUNK_BYTES:
            self._put_away(bytes(self._records))
            self._records.clear()

    def rows(self) -> Iterator[RequestRow]:
        """Yield the rows in order of arrival."""
        names = list(self._names)
        for chunk in self._chunks():
            for number, class_index, error_index, *rest in _iter_unpack(chunk):
                yield RequestRow(number, names[class_index], names[error_index], *rest)

    def merge(self, other: "RequestTable") -> None:
        """Add another table's rows."""
        for row in other.rows():
            self.append(row)

    def __getstate__(self) -> dict[str, Any]:
        return {"chunks": list(self._chunks()), "names": self._names, "classes": self._classes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # as a new one, then filled
        self._names, self._classes = state["names"], state["classes"]
        *full, last = state["chunks"]
        for chunk in full:
            self._put_away(chunk)
        self._records = bytearray(last)

    def _chunks(self) -> Iterator[bytes]:
        """All records, the ones not put away last."""
        for i in range(self._num_in_file):
            assert self._file is not None
            self._file.seek(i * _CHUNK_BYTES)
            yield self._file.read(_CHUNK_BYTES)
        yield from self._in_memory
        yield bytes(self._records)

    def _put_away(self, chunk: bytes) -> None:
        if not self._in_memory:
            with contextlib.suppress(OSError):
                self._write(chunk)
                return
        self._in_memory.append(chunk)

    def _write(self, chunk: bytes) -> None:
        if self._file is None:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(prefix="kvctl-bench-"))  # noqa: SIM115 - lives with us
            weakref.finalize(self, self._file.close)
        self._file.seek(self._num_in_file * _CHUNK_BYTES)
        self._file.write(chunk)
        self._file.flush()
        self._num_in_file += 1
