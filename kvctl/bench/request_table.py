"""What is kept of every request: one row of numbers, some 100 bytes, in a temporary file once there are thousands.

Rows hold moments (perf_counter seconds) and counts; latencies are derived from them by `metrics.timeline`, the one
definition. Knows nothing of HTTP. Floor 3.
"""

import tempfile
import weakref
from array import array
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


_TYPES = {
    **dict.fromkeys(("due_s", "sent_s", "first_s", "first_answer_s", "last_s", "end_s"), "d"),
    **dict.fromkeys(("connect_s", "max_gap_s", "output_tokens", "first_event_tokens"), "f"),
    **dict.fromkeys(("number", "num_events", "prompt_tokens", "cached_tokens", "asked_prompt_tokens"), "i"),
    **dict.fromkeys(("asked_output_tokens", "reasoning_events", "coalesced_events"), "i"),
    **dict.fromkeys(("class_index", "error_index"), "H"),
}
_STORED = tuple(name for name in _TYPES if not name.endswith("_index"))
_CHUNK_ROWS = 8192
_CHUNK_BYTES = _CHUNK_ROWS * sum(array(code).itemsize for code in _TYPES.values())


class RequestTable:
    """Rows, column by column; all but the last few thousand in a temporary file, so that memory does not grow."""

    def __init__(self) -> None:
        self._columns = _empty_columns()
        self._names: list[str] = []  # distinct class names and error kinds
        self._file: BinaryIO | None = None
        self._num_chunks = 0

    def __len__(self) -> int:
        return self._num_chunks * _CHUNK_ROWS + len(self._columns["number"])

    def append(self, row: RequestRow) -> None:
        """Add one row."""
        columns = self._columns
        for name in _STORED:
            columns[name].append(getattr(row, name))
        columns["class_index"].append(self._index(row.class_name))
        columns["error_index"].append(self._index(row.error_kind))
        if len(columns["number"]) == _CHUNK_ROWS:
            self._write_chunk()

    def rows(self) -> Iterator[RequestRow]:
        """Yield the rows in order of arrival."""
        for chunk in range(self._num_chunks):
            yield from self._rows_of(self._read_chunk(chunk))
        yield from self._rows_of(self._columns)

    def merge(self, other: "RequestTable") -> None:
        """Add another table's rows."""
        for row in other.rows():
            self.append(row)

    def __getstate__(self) -> dict[str, Any]:
        chunks = [self._read_chunk(chunk) for chunk in range(self._num_chunks)]
        return {"columns": self._columns, "names": self._names, "chunks": chunks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._names, self._file, self._num_chunks = state["names"], None, 0
        for columns in state["chunks"]:
            self._columns = columns
            self._write_chunk()
        self._columns = state["columns"]

    def _write_chunk(self) -> None:
        if self._file is None:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(prefix="kvctl-bench-"))  # noqa: SIM115 - lives with us
            weakref.finalize(self, self._file.close)
        self._file.seek(self._num_chunks * _CHUNK_BYTES)
        for column in self._columns.values():
            column.tofile(self._file)
        self._num_chunks += 1
        self._columns = _empty_columns()

    def _read_chunk(self, chunk: int) -> dict[str, "array[Any]"]:
        assert self._file is not None
        self._file.seek(chunk * _CHUNK_BYTES)
        columns = _empty_columns()
        for column in columns.values():
            column.fromfile(self._file, _CHUNK_ROWS)
        return columns

    def _rows_of(self, columns: dict[str, "array[Any]"]) -> Iterator[RequestRow]:
        stored = [columns[name] for name in _STORED]
        for i in range(len(columns["number"])):
            values = dict(zip(_STORED, (column[i] for column in stored), strict=True))
            yield RequestRow(
                class_name=self._names[columns["class_index"][i]],
                error_kind=self._names[columns["error_index"][i]],
                **values,
            )

    def _index(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)


def _empty_columns() -> dict[str, "array[Any]"]:
    return {name: array(code) for name, code in _TYPES.items()}
