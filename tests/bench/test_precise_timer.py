"""Deadlines: in order, never early, and with callbacks that set further ones."""

import asyncio
from time import perf_counter

from kvctl.bench.event_loop import new_event_loop
from kvctl.bench.precise_timer import PreciseTimer


def run(coroutine):
    loop = new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def test_callbacks_run_in_the_order_of_their_deadlines_and_not_early():
    async def main():
        timer = PreciseTimer(asyncio.get_running_loop())
        start_s = perf_counter()
        seen = []
        for delay_s in (0.03, 0.01, 0.02, 0.0, 0.0):
            timer.call_at(start_s + delay_s, lambda d=delay_s: seen.append((d, perf_counter() - start_s)))
        await timer.sleep_until(start_s + 0.04)
        timer.close()
        return seen

    seen = run(main())
    assert [delay for delay, _ in seen] == [0.0, 0.0, 0.01, 0.02, 0.03]
    assert all(at >= delay - 30e-6 for delay, at in seen)


def test_a_callback_may_set_the_next_deadline():
    async def main():
        timer = PreciseTimer(asyncio.get_running_loop())
        done = asyncio.Event()
        count = 0

        def again():
            nonlocal count
            count += 1
            if count == 50:
                done.set()
            else:
                timer.call_at(perf_counter() + 1e-4, again)

        timer.call_at(perf_counter(), again)
        await asyncio.wait_for(done.wait(), 10)
        timer.close()
        return count

    assert run(main()) == 50


def test_the_past_does_not_wait():
    async def main():
        timer = PreciseTimer(asyncio.get_running_loop())
        await timer.sleep_until(perf_counter() - 1)
        timer.close()

    run(main())
