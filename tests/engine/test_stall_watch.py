"""Times come in by hand: a step, a process that computes, one that does not."""

import math
import os

import pytest

from kvctl.engine.stall_watch import StallWatch, cpu_seconds


def watch(timeout_s: float = 60.0, *, counts_cpu_time: bool = True) -> StallWatch:
    return StallWatch(timeout_s, counts_cpu_time=counts_cpu_time)


def test_an_engine_that_owes_nothing_never_stalls() -> None:
    made = watch()
    assert made.stalled_s(1e9) is None
    made.sent(0.0)
    made.heard(1.0, owes_more=False)
    assert made.stalled_s(1e9) is None


def test_without_a_step_for_the_timeout_it_is_stalled_and_a_step_ends_that() -> None:
    made = watch()
    made.sent(100.0)
    assert made.stalled_s(159.9) is None
    assert made.stalled_s(160.0) == 60.0
    made.heard(200.0, owes_more=True)
    assert made.stalled_s(259.9) is None
    assert made.stalled_s(275.0) == 75.0


def test_clients_that_give_up_and_come_again_do_not_hide_it() -> None:
    made = watch()
    for now_s in range(0, 70, 10):  # a request, its abort, the next request, ...
        made.sent(float(now_s))
    assert made.stalled_s(60.0) == 60.0


def test_a_long_step_that_computes_gets_on() -> None:
    made = watch()
    made.sent(0.0)
    for now_s in range(0, 1000, 5):
        made.look(float(now_s), cpu_s=now_s * 0.3)  # a third of a core, on a busy machine
        assert made.stalled_s(now_s + 4.9) is None


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_process_that_computes_nothing_is_stalled(share: float) -> None:
    made = watch()
    made.sent(0.0)
    for now_s in range(0, 65, 5):
        made.look(float(now_s), cpu_s=7.0 + now_s * share)
    assert made.stalled_s(61.0) == 61.0


def test_cpu_time_of_before_the_request_does_not_count() -> None:
    made = watch(10.0)
    made.look(0.0, cpu_s=0.0)
    made.heard(50.0, owes_more=False)
    made.sent(51.0)
    made.look(53.0, cpu_s=30.0)
    made.look(58.0, cpu_s=30.0)
    made.look(63.0, cpu_s=30.0)
    assert made.stalled_s(63.5) == 12.5


def test_a_step_that_computes_for_twenty_times_the_timeout_is_stalled_too() -> None:
    made = watch(10.0)
    made.sent(0.0)
    for now_s in range(0, 211, 2):
        made.look(float(now_s), cpu_s=float(now_s))
    assert made.stalled_s(205.0) is None
    assert made.stalled_s(211.0) == 211.0


def test_on_a_gpu_only_steps_count() -> None:
    made = watch(counts_cpu_time=False)
    made.sent(0.0)
    for now_s in range(0, 65, 5):
        made.look(float(now_s), cpu_s=float(now_s))
    assert made.stalled_s(61.0) == 61.0


def test_where_cpu_time_cannot_be_had_a_step_on_a_cpu_gets_the_longer_time() -> None:
    made = watch()
    made.sent(0.0)
    for now_s in range(0, 200, 5):
        made.look(float(now_s), cpu_s=None)
    assert made.stalled_s(200.0) is None


def test_it_can_be_switched_off() -> None:
    made = watch(math.inf)
    made.sent(0.0)
    assert made.stalled_s(1e12) is None


def test_the_cpu_time_of_a_process_is_read_while_it_lives() -> None:
    own = cpu_seconds(os.getpid())
    assert own is not None and 0 < own <= sum(os.times()[:2]) + 0.1
    assert cpu_seconds(2**22 + 1) is None
