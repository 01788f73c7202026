"""Measures this client before it measures a server: a scripted server, the same concurrency, two seconds.

The scripted server logs when it wrote each event, and both processes read one monotonic clock, so the client's error
is the difference per request, whatever the scheduler did to either. Floor 3.
"""

import statistics
from itertools import pairwise
from time import perf_counter

import httpx

from kvctl.bench.client import ClientConfig
from kvctl.bench.load_process import LoadJob, run_aside
from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript
from kvctl.bench.run_config import LoadConfig, RequestConfig
from kvctl.bench.verdict import Calibration
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.errors import ServerUnreachable
from kvctl.metrics.summary import percentile
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.prompts import TokenRate
from kvctl.workload.workload_profile import WorkloadClass, WorkloadProfile

_TOTAL_S = 1.95  # start and stop of the scripted server included
_STOP_S = 0.1
_LEAST_LOAD_S = 0.3
_MAX_EVENTS_PER_S = 25_000
_TTFT_S = 0.05
_TOKENS = 32


def calibrate(concurrency: int, *, num_workers: int = 1) -> Calibration:
    """Run against a scripted server with as many streams; gaps of 10 ms, longer where that is over 25,000 events/s.

    Raises:
        ServerUnreachable: the scripted server does not start.
    """
    begin_s = perf_counter()
    gap_s = max(0.01, concurrency / _MAX_EVENTS_PER_S)
    script = MockScript(ttft_s=_TTFT_S, gap_s=gap_s, tokens=_TOKENS)
    with start_mock_process(script) as url:
        answer_s = _TTFT_S + (_TOKENS - 1) * gap_s
        left_s = begin_s + _TOTAL_S - _STOP_S - answer_s - perf_counter()
        job = calibration_job(url, concurrency, max(left_s, _LEAST_LOAD_S))
        measured = run_aside(job, num_workers=num_workers)
        try:
            log = httpx.get(f"{url}/mock/log", timeout=20, trust_env=False).json()
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"the scripted server does not answer: {error}") from None
    written_s = {request_id: times_s for request_id, _, times_s in log["streams"]}
    errors_s, truths_s, gaps_s = [], [], []
    rows = [row for row in measured.rows.rows() if row.is_completed]
    for row in rows:
        for prefix in (job.id_prefix, *(f"{job.id_prefix}-w{part}" for part in range(num_workers))):
            times_s = written_s.get(f"{prefix}-{row.number}")
            if times_s and abs(times_s[0] - row.first_s) < 1.0:
                errors_s.append(row.first_s - times_s[0])
                truths_s.append(times_s[0] - row.sent_s)
                gaps_s += [later - earlier for earlier, later in pairwise(times_s)]
                break
    if not errors_s:
        raise ServerUnreachable("the calibration got no answers", hint="Try --no-calibrate.")
    errors_s.sort()
    gap_truth_s = statistics.median(gaps_s) if gaps_s else gap_s
    gap_s = measured.gaps.percentile_s(50) or 0.0
    duration_s = measured.end_s - measured.start_s
    num_gaps = sum(max(0, row.num_events - 1) for row in rows)
    return Calibration(
        concurrency=concurrency,
        events_per_s=measured.num_events / duration_s,
        ttft_error_p50_s=statistics.median(errors_s),
        ttft_error_p99_s=percentile(errors_s, 99),
        ttft_truth_p50_s=statistics.median(truths_s),
        gap_error_share=gap_s / gap_truth_s - 1 if gap_truth_s > 0 else 0.0,
        cpu_s_per_event=measured.cpu_s / measured.num_events,
        coalesced_share=sum(row.coalesced_events for row in rows) / num_gaps if num_gaps else 0.0,
        duration_s=perf_counter() - begin_s,
    )


def calibration_job(url: str, concurrency: int, duration_s: float) -> LoadJob:
    """The load of a calibration: short prompts, closed loop, a quick ramp; its answers end after its duration."""
    workload_class = WorkloadClass("calibration", LengthSpec.fixed(32), LengthSpec.fixed(_TOKENS))
    return LoadJob(
        client=ClientConfig(url, timeout_s=10),
        load=LoadConfig(concurrency=concurrency, duration_s=duration_s, ramp_s=min(0.4, 0.002 * concurrency)),
        request=RequestConfig(),
        workload=WorkloadChoice(WorkloadProfile("calibration", (workload_class,))),
        rate=TokenRate(),
        id_prefix="calibration",
    )
