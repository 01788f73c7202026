"""How many requests are in flight, and when the next one is turned away.

Knows no request, only counts: those that came in and have not been answered to the end. Floor 3.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kvctl.errors import QueueFull

REASON: Final = "max_num_queued_reqs"  # the label in vllm:admission_rejections


class Admission:
    """Counts requests in flight; with `max_in_flight` reached a newcomer gets 503 and may come again."""

    def __init__(self, max_in_flight: int | None = None, on_rejection: Callable[[], None] | None = None) -> None:
        self._max_in_flight = max_in_flight
        self._on_rejection = on_rejection
        self.in_flight = 0

    def check(self) -> None:
        """See whether one more would be taken now.

        Raises:
            QueueFull: the limit is reached.
        """
        if self._max_in_flight is not None and self.in_flight >= self._max_in_flight:
            if self._on_rejection is not None:
                self._on_rejection()
            raise QueueFull(
                f"{self.in_flight} requests are in flight, the limit is {self._max_in_flight}",
                hint="Try again later; the server's --max-num-queued-reqs sets the limit.",
            )

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a request for as long as it is served.

        Raises:
            QueueFull: the limit is reached.
        """
        self.check()
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
