import random

import pytest

from kvctl.core.request import Request
from kvctl.core.request_queue import FcfsQueue, PriorityQueue, make_queue
from kvctl.core.sampling_params import SamplingParams


def request(name: str, priority: int = 0, arrival_s: float = 0.0) -> Request:
    return Request(name, [1], SamplingParams(), arrival_s=arrival_s, priority=priority)


def names(queue: FcfsQueue | PriorityQueue) -> list[str]:
    listed = [r.request_id for r in queue]
    popped = []
    while queue:
        head = queue.peek()
        queue.remove(head)
        popped.append(head.request_id)
    assert listed == popped
    return popped


def test_fcfs_keeps_the_order_of_arrival_and_preempted_ones_return_to_the_front() -> None:
    queue = FcfsQueue()
    for name in "abc":
        queue.add(request(name))
    queue.put_back(request("first"))
    assert names(queue) == ["first", "a", "b", "c"]


def test_priority_orders_by_priority_then_arrival_and_preempted_ones_find_their_place() -> None:
    queue = PriorityQueue()
    queue.add(request("late", 0, 5.0))
    queue.add(request("low", 9, 1.0))
    queue.add(request("early", 0, 2.0))
    queue.put_back(request("preempted", 0, 3.0))
    assert names(queue) == ["early", "preempted", "late", "low"]


def test_of_equals_a_preempted_one_goes_first() -> None:
    queue = PriorityQueue()
    for name in ("r_0", "r_1"):  # children of one request arrive together
        queue.add(request(name))
    queue.put_back(request("preempted"))
    assert names(queue) == ["preempted", "r_0", "r_1"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_any_request_can_be_taken_out(policy: str) -> None:
    rng = random.Random(3)
    queue = make_queue(policy)  # type: ignore[arg-type]
    requests = [request(str(i), rng.randrange(3), rng.random()) for i in range(300)]
    for r in requests:
        queue.add(r)
    gone = rng.sample(requests, 250)
    for r in gone:
        queue.remove(r)
    assert len(queue) == 50
    left = [r for r in requests if r not in gone]
    if policy == "priority":
        left.sort(key=lambda r: (r.priority, r.arrival_s))
    assert names(queue) == [r.request_id for r in left]  # type: ignore[arg-type]


def test_a_request_id_can_come_back_with_another_priority() -> None:
    queue = PriorityQueue()
    first = request("a", 0)
    queue.add(first)
    queue.add(request("b", 1))
    queue.remove(first)
    queue.add(request("a", 5))
    assert names(queue) == ["b", "a"]
