"""The order in which waiting requests are tried: first come first served, or by priority.

Knows nothing of blocks or budgets. A preempted request goes back with `put_back`. All operations are O(1)
(fcfs) or O(log n) (priority), removal from the middle included. Floor 0.
"""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from kvctl.core.config import SchedulingPolicy
from kvctl.core.request import Request


class RequestQueue(Protocol):
    """Waiting requests in the order they will be tried."""

    def add(self, request: Request) -> None:
        """Take in a request that just arrived."""
        ...

    def put_back(self, request: Request) -> None:
        """Take in a request that was preempted."""
        ...

    def peek(self) -> Request:
        """The request to try next; it stays in the queue. The queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served; a preempted request returns to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """Append at the back."""
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        """Insert at the front."""
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """The front request."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take it out in O(1)."""
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


_HeapEntry = tuple[int, float, int, Request]


class PriorityQueue:
    """Lowest (priority, arrival, order of arrival) first; a preempted request finds its old place."""

    def __init__(self) -> None:
        self._heap: list[_HeapEntry] = []
        self._entries: dict[str, _HeapEntry] = {}  # the live entry of each request; others in the heap are dead
        self._arrivals = 0

    def _push(self, request: Request, order: int) -> None:
        entry = (request.priority, request.arrival_s, order, request)
        self._entries[request.request_id] = entry
        heapq.heappush(self._heap, entry)

    def add(self, request: Request) -> None:
        """Insert by importance."""
        self._arrivals += 1
        self._push(request, self._arrivals)

    def put_back(self, request: Request) -> None:
        """Insert by importance, before its equals."""
        self._arrivals += 1
        self._push(request, -self._arrivals)

    def peek(self) -> Request:
        """The most important request."""
        while self._entries.get(self._heap[0][3].request_id) is not self._heap[0]:
            heapq.heappop(self._heap)  # removed earlier
        return self._heap[0][3]

    def remove(self, request: Request) -> None:
        """Mark its entry dead; the heap is rebuilt once most of it is."""
        del self._entries[request.request_id]
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[3] for entry in sorted(self._entries.values(), key=lambda entry: entry[:3]))


def make_queue(policy: SchedulingPolicy) -> RequestQueue:
    """The queue of a policy."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
