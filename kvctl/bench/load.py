"""Issues requests: as many at once as asked (closed loop), or each when it is due (open loop).

A closed loop's streams start spread over a ramp, so that they do not all want their first token at once. An open
loop never waits for the server: what is due is sent, or, under a cap, waits in the client and is counted from the
moment it was due. Knows sessions and bodies; knows nothing of HTTP or of reports. Floor 3.
"""

import asyncio
import gc
import random
import resource
import sys
from collections.abc import Iterator
from itertools import repeat
from time import perf_counter

from kvctl.bench.body import BodyBuilder
from kvctl.bench.client import LoadClient
from kvctl.bench.collector import BINS_PER_S, Collector, Measurements
from kvctl.bench.http_connection import Exchange
from kvctl.bench.precise_timer import PreciseTimer
from kvctl.bench.run_config import LoadConfig
from kvctl.workload.request_plan import Session, Turn

_LAG_PROBE_S = (0.002, 0.008)  # a probe of the loop's lag this often, at random: no beat with the tokens
_SAMPLE_S = 0.05  # where the kernel's stamps tell the lag, a probe only samples what is in flight
_MIN_REQUESTS_FOR_ERROR_RATE = 20
_DEAD_AFTER = 50  # failures in a row, and four for each stream: a server that has died, whatever it did before


class LoadRun:
    """One run of one process. `stop()` ends the issuing; what is under way is waited for."""

    def __init__(
        self,
        client: LoadClient,
        load: LoadConfig,
        sessions: Iterator[Session],
        body_builder: BodyBuilder,
        timer: PreciseTimer,
        *,
        id_prefix: str,
        due_times_s: Iterator[float] | None = None,
        keep_times: bool = False,
    ) -> None:
        """`due_times_s`: when requests are due after the start; None: their sessions say so."""
        self.collector = Collector()
        self._client = client
        self._load = load
        self._sessions = sessions
        self._body = body_builder
        self._timer = timer
        self._id_prefix = id_prefix
        self._due_times_s = due_times_s
        self._keep_times = keep_times
        self._tickets = load.num_requests if load.num_requests is not None else 1 << 62
        self._num_issued = 0
        self._stop_s = float("inf")
        self._is_stopped = False
        self._cap = asyncio.Semaphore(load.max_in_flight) if load.max_in_flight else None
        self._num_failed_in_a_row = 0
        streams = load.concurrency or load.max_in_flight or 0
        self._dead_after = max(_DEAD_AFTER, 4 * streams)
        self._probe_due_s = 0.0
        self._rng = random.Random(load.seed)

    async def run(self, start_s: float | None = None) -> Measurements:
        """Issue everything from `start_s` (perf_counter seconds) on, wait for the answers, return what was measured."""
        measured = self.collector.measured
        measured.has_precise_timer = self._timer.is_precise
        thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()  # what exists now stays: a collection that walks it would be a pause of milliseconds
        gc.set_threshold(50_000, *thresholds[1:])
        usage_before = resource.getrusage(resource.RUSAGE_SELF)
        measured.start_s = start_s = max(start_s or 0.0, perf_counter())
        measured.ramp_end_s = start_s + self._load.effective_ramp_s
        if self._load.duration_s is not None:
            self._stop_s = start_s + self._load.duration_s
        self._timer.call_at(start_s, self._probe)
        try:
            if self._load.concurrency is not None:
                await self._run_closed(self._load.concurrency, start_s)
            else:
                await self._run_open(start_s)
        except asyncio.CancelledError:
            measured.interrupted = True
            self._note_issue_end()
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            self._is_stopped = True
            self._client.clock.flush()
            measured.uses_kernel_clock = self._client.clock.uses_kernel
            if measured.uses_kernel_clock:
                measured.lags = self._client.clock.lags
            measured.end_s = perf_counter()
            usage = resource.getrusage(resource.RUSAGE_SELF)
            measured.cpu_s = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
            measured.max_rss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            measured.num_connections = self._client.num_connections
        return measured

    def stop(self) -> None:
        """Issue nothing more."""
        self._is_stopped = True
        self._note_issue_end()

    # ---- closed loop ----

    async def _run_closed(self, concurrency: int, start_s: float) -> None:
        step_s = self._load.effective_ramp_s / concurrency
        users = [asyncio.create_task(self._user(start_s + i * step_s)) for i in range(concurrency)]
        await self._drain(set(users))

    async def _user(self, start_s: float) -> None:
        await self._timer.sleep_until(start_s)
        due_s = start_s
        while not self._has_ended():
            session = next(self._sessions, None)
            if session is None:
                break
            await self._run_session(session, due_s)
            due_s = perf_counter()
        self._note_issue_end()

    # ---- open loop ----

    async def _run_open(self, start_s: float) -> None:
        running: set[asyncio.Task[None]] = set()
        try:
            await self._issue(running, start_s)
        except asyncio.CancelledError:
            self.collector.measured.interrupted = True
            await _cancel(running)
            raise
        self._note_issue_end()
        await self._drain(running)

    async def _issue(self, running: set[asyncio.Task[None]], start_s: float) -> None:
        num_due = 0
        for session, due_s in self._schedule(start_s):
            if due_s <= perf_counter():
                await asyncio.sleep(0)  # behind the schedule: answers and Ctrl-C must still be heard
            else:
                await self._timer.sleep_until(due_s)
            if self._is_stopped or num_due >= self._tickets:
                return
            num_due += len(session.turns)
            task = asyncio.create_task(self._run_session(session, due_s))
            running.add(task)
            task.add_done_callback(running.discard)
        if self._load.arrivals is not None and self._load.duration_s is not None and not self._has_ended():
            await self._timer.sleep_until(self._stop_s)

    def _schedule(self, start_s: float) -> Iterator[tuple[Session, float]]:
        due_times_s = self._due_times_s
        for time_s, session in zip(repeat(0.0) if due_times_s is None else due_times_s, self._sessions, strict=False):
            due_s = start_s + (time_s if due_times_s is not None else session.due_s or 0.0)
            if due_s >= self._stop_s:
                return
            yield session, due_s

    # ---- both ----

    def _has_ended(self) -> bool:
        return self._is_stopped or self._num_issued >= self._tickets or perf_counter() >= self._stop_s

    def _note_issue_end(self) -> None:
        if not self.collector.measured.issue_end_s:
            self.collector.measured.issue_end_s = min(perf_counter(), self._stop_s)

    async def _run_session(self, session: Session, due_s: float) -> None:
        history: list[tuple[str, str]] = []
        is_last = len(session.turns) == 1
        for i, turn in enumerate(session.turns):
            if i:
                due_s = perf_counter() + turn.think_s
                await self._timer.sleep_until(due_s)
                is_last = i == len(session.turns) - 1
            if self._has_ended() and not (i == 0 and self._load.is_open and not self._is_stopped):
                return
            wait_s = await self._find_place()
            if wait_s is None:
                return
            exchange, has_failed = await self._send(
                turn, history, due_s, session.class_name, place_wait_s=wait_s, keep_text=not is_last
            )
            if self._cap is not None:
                self._cap.release()
            if has_failed:
                await self._wait_after_failure(exchange)
                return
            if not is_last:
                history.append((turn.text, "".join(exchange.decoder.text or ())))

    async def _find_place(self) -> float | None:
        """Wait for a place under the cap; how long it took. None: the run ended first, what was due is never sent."""
        if self._num_issued >= self._tickets:
            return None
        if self._cap is None:
            return 0.0
        begin_s = perf_counter()
        try:
            await self._cap.acquire()
        except asyncio.CancelledError:
            self._count_never_sent()
            raise
        if self._has_ended():
            self._cap.release()
            self._count_never_sent()
            return None
        return perf_counter() - begin_s

    def _count_never_sent(self) -> None:
        if self._num_issued < self._tickets and not self.collector.measured.interrupted:
            self.collector.measured.num_never_sent += 1

    async def _send(
        self,
        turn: Turn,
        history: list[tuple[str, str]],
        due_s: float,
        class_name: str,
        *,
        place_wait_s: float,
        keep_text: bool,
    ) -> tuple[Exchange, bool]:
        """Send one request; (its exchange, whether it failed)."""
        number = self._num_issued
        self._num_issued += 1
        collector = self.collector
        has_failed = True

        def take(exchange: Exchange) -> None:
            nonlocal has_failed
            collector.ended()
            has_failed = collector.add(exchange, number, turn, class_name)
            self._judge_errors(has_failed)

        collector.sent()
        exchange = await self._client.perform(
            f"{self._id_prefix}-{number}",
            self._body.build(turn, history),
            due_s,
            take,
            place_wait_s=place_wait_s,
            keep_text=keep_text,
            keep_times=self._keep_times,
        )
        return exchange, has_failed

    def _judge_errors(self, has_failed: bool) -> None:
        """Stop a hopeless run: too large a share failed, or everything for a while."""
        if not has_failed:
            self._num_failed_in_a_row = 0
            return
        self._num_failed_in_a_row += 1
        limit = self._load.max_error_rate
        if limit is None or limit >= 1.0 or self._is_stopped:
            return
        num_ended = self.collector.num_ended
        share = self.collector.measured.errors.total() / num_ended
        is_dead = self._num_failed_in_a_row >= self._dead_after
        if is_dead or (num_ended >= _MIN_REQUESTS_FOR_ERROR_RATE and share > limit):
            self.collector.measured.stopped_by_errors = True
            self.stop()

    async def _wait_after_failure(self, exchange: Exchange) -> None:
        """Wait as the server asked, or a little, before this user tries again."""
        if self._load.concurrency is not None and not self._is_stopped:
            wait_s = min(exchange.retry_after_s or 0.05, self._load.retry_wait_max_s)
            await self._timer.sleep_until(min(perf_counter() + wait_s, self._stop_s))

    async def _drain(self, tasks: set[asyncio.Task[None]]) -> None:
        """Wait for all; from the end of the issuing on for at most the drain timeout."""
        try:
            while tasks:
                left_s = max(0.0, self._stop_s - perf_counter())
                if not left_s:
                    self._note_issue_end()  # every stream may hang: none has come to see that the time is over
                if self.collector.measured.issue_end_s:
                    left_s = self.collector.measured.issue_end_s + self._load.drain_timeout_s - perf_counter()
                    if left_s <= 0:
                        break
                done, tasks = await asyncio.wait(tasks, timeout=min(left_s, 0.5), return_when=asyncio.ALL_COMPLETED)
                for task in done:
                    task.result()
        except asyncio.CancelledError:
            self.collector.measured.interrupted = True
            raise
        finally:
            await _cancel(tasks)

    def _probe(self) -> None:
        """Measure how late the loop met this deadline, as it would an arrival, and set the next one."""
        if self._is_stopped:
            return
        now_s = perf_counter()
        measured = self.collector.measured
        if self._probe_due_s:
            measured.lags.add((max(0.0, now_s - self._probe_due_s),))
            index = int(now_s * BINS_PER_S)
            if index not in measured.in_flight_per_bin:
                measured.in_flight_per_bin[index] = self.collector.in_flight
        wait_s = _SAMPLE_S if self._client.clock.uses_kernel else self._rng.uniform(*_LAG_PROBE_S)
        self._probe_due_s = now_s + wait_s
        self._timer.call_at(self._probe_due_s, self._probe)


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
