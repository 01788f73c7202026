"""What is kept of every request: one row of numbers, some 100 bytes, so that an hour of load fits in memory.

Rows hold moments (perf_counter seconds) and counts; latencies are derived from them by `metrics.timeline`, the one
definition. Knows nothing of HTTP. Floor 3.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

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


_MOMENTS = ("due_s", "sent_s", "first_s", "first_answer_s", "last_s", "end_s")
_FLOATS = ("connect_s", "max_gap_s", "output_tokens", "first_event_tokens")
_COUNTS = (
    "number",
    "num_events",
    "prompt_tokens",
    "cached_tokens",
    "asked_prompt_tokens",
    "asked_output_tokens",
    "reasoning_events",
    "coalesced_events",
)


class RequestTable:
    """Rows, column by column."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float] | array[int]] = {
            **{name: array("d") for name in _MOMENTS},
            **{name: array("f") for name in _FLOATS},
            **{name: array("i") for name in _COUNTS},
        }
        self._names: list[str] = []  # distinct class names and error kinds
        self._class_index = array("H")
        self._error_index = array("H")

    def __len__(self) -> int:
        return len(self._class_index)

    def append(self, row: RequestRow) -> None:
        """Add one row."""
        for name, column in self._columns.items():
            column.append(getattr(row, name))
        self._class_index.append(self._index(row.class_name))
        self._error_index.append(self._index(row.error_kind))

    def rows(self) -> Iterator[RequestRow]:
        """Yield the rows in order of arrival."""
        columns = self._columns
        for i in range(len(self)):
            values = {name: column[i] for name, column in columns.items()}
            yield RequestRow(
                class_name=self._names[self._class_index[i]],
                error_kind=self._names[self._error_index[i]],
                **values,  # type: ignore[arg-type]  # names and kinds of the columns are those of the row
            )

    def merge(self, other: "RequestTable") -> None:
        """Add another table's rows."""
        for row in other.rows():
            self.append(row)

    def _index(self, name: str) -> int:
        if name not in self._names:
            self._names.append(name)
        return self._names.index(name)
