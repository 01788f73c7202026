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
_MIN_REQUESTS_FOR_ERROR_RATE = 20
_DECODE_ALL = 1 << 30


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
        keep_times: bool = False,
    ) -> None:
        self.collector = Collector()
        self._client = client
        self._load = load
        self._sessions = sessions
        self._body = body_builder
        self._timer = timer
        self._id_prefix = id_prefix
        self._keep_times = keep_times
        self._tickets = load.num_requests if load.num_requests is not None else 1 << 62
        self._num_issued = 0
        self._stop_s = float("inf")
        self._is_stopped = False
        self._cap = asyncio.Semaphore(load.max_in_flight) if load.max_in_flight else None
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
            self._client.pump.drain()
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
        num_due = 0
        for session, due_s in self._schedule(start_s):
            await self._timer.sleep_until(due_s)
            if self._is_stopped or num_due >= self._tickets:
                break
            num_due += len(session.turns)
            task = asyncio.create_task(self._run_session(session, due_s))
            running.add(task)
            task.add_done_callback(running.discard)
        if self._load.arrivals is not None and self._load.duration_s is not None and not self._has_ended():
            await self._timer.sleep_until(self._stop_s)
        self._note_issue_end()
        await self._drain(running)

    def _schedule(self, start_s: float) -> Iterator[tuple[Session, float]]:
        arrivals = self._load.arrivals
        times_s = repeat(0.0) if arrivals is None else arrivals.times_s(self._load.seed)
        for time_s, session in zip(times_s, self._sessions, strict=False):
            due_s = start_s + (time_s if arrivals is not None else session.due_s or 0.0)
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
            if not await self._find_place():
                return
            exchange = await self._send(turn, history, due_s, session.class_name, keep_text=not is_last)
            if self._cap is not None:
                self._cap.release()
            if exchange.error_kind is not None:
                await self._after_failure(exchange)
                return
            if not is_last:
                exchange.decode_some(_DECODE_ALL)
                history.append((turn.text, "".join(exchange.decoder.text or ())))

    async def _find_place(self) -> bool:
        """Wait for a place under the cap. False: the run ended first (and what was due is never sent)."""
        if self._num_issued >= self._tickets:
            return False
        if self._cap is not None:
            await self._cap.acquire()
            if self._has_ended():
                self._cap.release()
                if self._num_issued < self._tickets:
                    self.collector.measured.num_never_sent += 1
                return False
        return True

    async def _send(
        self, turn: Turn, history: list[tuple[str, str]], due_s: float, class_name: str, *, keep_text: bool
    ) -> Exchange:
        number = self._num_issued
        self._num_issued += 1
        collector = self.collector
        collector.sent()
        try:
            return await self._client.perform(
                f"{self._id_prefix}-{number}",
                self._body.build(turn, history),
                due_s,
                lambda exchange: collector.add(exchange, number, turn, class_name),
                keep_text=keep_text,
                keep_times=self._keep_times,
            )
        finally:
            collector.ended()

    async def _after_failure(self, exchange: Exchange) -> None:
        """Stop a hopeless run; else wait as the server asked, or a little, before this user tries again."""
        limit = self._load.max_error_rate
        num_ended = self.collector.num_ended
        num_failed = self.collector.measured.errors.total() + 1  # this one is not decoded yet
        if limit is not None and num_ended >= _MIN_REQUESTS_FOR_ERROR_RATE and num_failed / num_ended > limit:
            self.collector.measured.stopped_by_errors = True
            self.stop()
        elif self._load.concurrency is not None:
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
        self._probe_due_s = now_s + self._rng.uniform(*_LAG_PROBE_S)
        self._timer.call_at(self._probe_due_s, self._probe)
