"""Runs a load to its end: in this process, or split over several when one core is not enough.

Each process gets its share of the streams (or of the rate and of the requests), its own event loop and its own
seed, starts at the same moment, and sends its measurements back to be merged. Floor 3.
"""

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from time import perf_counter

from kvctl.bench.body import BodyBuilder
from kvctl.bench.client import ClientConfig, LoadClient
from kvctl.bench.collector import Measurements
from kvctl.bench.event_loop import new_event_loop
from kvctl.bench.load import LoadRun
from kvctl.bench.precise_timer import PreciseTimer
from kvctl.bench.run_config import LoadConfig, RequestConfig
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.errors import KvctlError
from kvctl.workload.prompts import PromptMaker, TokenRate
from kvctl.workload.request_plan import Session

_START_DELAY_S = 0.6  # for other processes to be ready

Watch = Callable[[LoadRun], Awaitable[None]]


@dataclass(frozen=True)
class LoadJob:
    """All that a process needs to run a load; can be pickled."""

    client: ClientConfig
    load: LoadConfig
    request: RequestConfig
    workload: WorkloadChoice
    rate: TokenRate
    id_prefix: str
    keep_times: bool = False
    part: int = 0
    num_parts: int = 1

    def sessions(self) -> Iterator[Session]:
        """This part's sessions: every n-th of a file, or a seed of its own."""
        maker = PromptMaker(self.load.seed, self.rate, key_seed=self.load.seed - self.part)
        sessions = self.workload.sessions(maker)
        return islice(sessions, self.part, None, self.num_parts) if self.workload.is_finite else sessions

    def due_times_s(self) -> Iterator[float] | None:
        """When this part's requests are due: every n-th of the one schedule. None: no schedule."""
        if self.load.arrivals is None:
            return None
        return islice(self.load.arrivals.times_s(self.load.seed - self.part), self.part, None, self.num_parts)


def run_load(job: LoadJob, *, num_workers: int = 1, watch: Watch | None = None) -> Measurements:
    """Run a load; Ctrl-C ends it early with what was measured so far. `watch` runs beside it on the same loop.

    Raises:
        ServerUnreachable: the host's name is not known.
        KvctlError: a worker process failed.
    """
    num_workers = min([num_workers, *(n for n in _divided(job.load) if n is not None)])
    if num_workers <= 1:
        return _run_here(job, None, watch)
    return _run_in_processes(job, num_workers)


def run_aside(job: LoadJob, *, num_workers: int = 1) -> Measurements:
    """Run a load that only prepares the measured one (calibration, warm-up): Ctrl-C in it ends everything.

    Raises:
        KeyboardInterrupt: it was interrupted; nothing has been measured that could be kept.
        KvctlError: a worker process failed.
    """
    measured = run_load(job, num_workers=num_workers)
    if measured.interrupted:
        raise KeyboardInterrupt
    return measured


# uvloop ends a TLS connection, a refused one too, over several turns of the loop; closing the loop before is an error.
_TLS_FAREWELL_S = 0.2


def _run_here(job: LoadJob, start_s: float | None, watch: Watch | None) -> Measurements:
    async def main() -> Measurements:
        loop = asyncio.get_running_loop()
        timer = PreciseTimer(loop)
        client = LoadClient(job.client, loop, timer)
        run = LoadRun(
            client,
            job.load,
            job.sessions(),
            BodyBuilder(job.request),
            timer,
            id_prefix=job.id_prefix,
            due_times_s=job.due_times_s(),
            keep_times=job.keep_times,
        )
        await client.resolve()
        loading = asyncio.ensure_future(run.run(start_s))
        watching = asyncio.ensure_future(watch(run)) if watch is not None else None
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.add_signal_handler(signal.SIGINT, loading.cancel)
        try:
            return await loading
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            client.close()
            timer.close()
            if job.client.url.startswith("https:"):
                await asyncio.sleep(_TLS_FAREWELL_S)

    loop = new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def _divided(load: LoadConfig) -> tuple[int | None, ...]:
    """What is shared out among processes, of which each needs one at least."""
    return load.concurrency, load.num_requests, load.max_in_flight


def split_job(job: LoadJob, num_workers: int) -> list[LoadJob]:
    """Divide a load into parts that add up to it."""

    def share(total: int | None, part: int) -> int | None:
        return None if total is None else total // num_workers + (part < total % num_workers)

    parts = []
    for part in range(num_workers):
        load = replace(
            job.load,
            concurrency=share(job.load.concurrency, part),
            num_requests=share(job.load.num_requests, part),
            max_in_flight=share(job.load.max_in_flight, part),
            ramp_s=job.load.effective_ramp_s,
            seed=job.load.seed + part,
        )
        prefix = f"{job.id_prefix}-w{part}"
        parts.append(replace(job, load=load, id_prefix=prefix, part=part, num_parts=num_workers))
    return parts


def _run_in_processes(job: LoadJob, num_workers: int) -> Measurements:
    context = multiprocessing.get_context("spawn")
    start_s = perf_counter() + _START_DELAY_S
    running = []
    for part in split_job(job, num_workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(part, start_s, theirs), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours))
    merged: Measurements | None = None
    try:
        for process, pipe in running:
            measured = _receive(pipe)
            process.join(timeout=10)
            if merged is None:
                merged = measured
            else:
                merged.merge(measured)
    finally:
        for process, _ in running:
            if process.is_alive():
                process.terminate()
    assert merged is not None
    return merged


def _receive(pipe: "Connection[None, Measurements | KvctlError]") -> Measurements:
    while True:
        try:
            measured = pipe.recv()
        except KeyboardInterrupt:
            continue  # the workers got it too, and are about to send what they have
        except EOFError:
            raise KvctlError("a worker process of the load died", hint="Run again with fewer --workers.") from None
        if isinstance(measured, KvctlError):
            raise measured
        return measured


def _work(job: LoadJob, start_s: float, pipe: "Connection[Measurements | KvctlError, None]") -> None:
    try:
        pipe.send(_run_here(job, start_s, None))
    except KvctlError as error:
        pipe.send(KvctlError(error.message, hint=error.hint))
    finally:
        pipe.close()
