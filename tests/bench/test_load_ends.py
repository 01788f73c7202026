"""How loads begin late, are shared out, and end: by Ctrl-C, by failures, by the end of the drain."""

import asyncio
import itertools
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from kvctl.bench.load_process import run_load, split_job
from kvctl.bench.mock_script import MockScript
from kvctl.workload.arrivals import ArrivalSpec
from tests.bench.test_load import job, rows_of


def test_workers_share_one_schedule_and_are_never_more_than_streams(mock_server):
    spec = ArrivalSpec.steady(100.0, "gamma", 0.5)
    one = job("http://x", arrivals=spec, num_requests=30)
    whole = list(itertools.islice(one.due_times_s(), 30))
    parts = [list(itertools.islice(part.due_times_s(), 10)) for part in split_job(one, 3)]
    assert sorted(itertools.chain(*parts)) == whole
    measured = run_load(job(mock_server(), concurrency=1, num_requests=3), num_workers=4)
    assert (len(measured.rows), measured.max_in_flight) == (3, 1)


def run_until(url, condition, **load):
    """Run a load as a process of its own does, and cancel it, as Ctrl-C does, once a condition holds."""
    found = []

    async def watch(run):
        loading = next(task for task in asyncio.all_tasks() if "LoadRun.run" in repr(task.get_coro()))
        while not condition(run):
            await asyncio.sleep(0.005)
        found.append(run)
        loading.cancel()

    return run_load(job(url, num_requests=None, duration_s=60.0, **load), watch=watch)


def test_ctrl_c_while_an_open_loop_is_issuing_loses_nothing(mock_server):
    spec = ArrivalSpec.steady(50.0, "constant")
    measured = run_until(mock_server(ttft_s=0.4), lambda run: len(run.collector.measured.rows) >= 5, arrivals=spec)
    assert measured.interrupted
    assert not measured.errors
    assert measured.num_unfinished >= 5  # 50 a second, 0.4 s each
    assert measured.num_unfinished + len(measured.rows) <= measured.max_in_flight + len(measured.rows)


def test_a_loop_far_behind_its_schedule_still_hears_answers_and_ctrl_c(mock_server):
    spec = ArrivalSpec.steady(200_000.0, "constant")
    measured = run_until(mock_server(), lambda run: len(run.collector.measured.rows) >= 3, arrivals=spec)
    assert measured.interrupted
    assert len(measured.rows) >= 3


@pytest.mark.parametrize("fault", ["error", "500"])
def test_failures_of_every_kind_stop_a_hopeless_run(mock_server, fault):
    measured = run_load(job(mock_server(fault=fault), num_requests=10_000, concurrency=20, max_error_rate=0.5))
    assert measured.stopped_by_errors
    assert len(measured.rows) < 200


def test_a_server_that_died_is_hopeless_whatever_it_did_before():
    script = MockScript(ttft_s=0.0, gap_s=0.0, tokens=1)
    command = [sys.executable, "-m", "kvctl.bench.mock_process", json.dumps(asdict(script))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        async def watch(run):
            while len(run.collector.measured.rows) < 200:
                await asyncio.sleep(0.005)
            server.kill()

        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        load = {"num_requests": None, "duration_s": 600.0, "concurrency": 4, "max_error_rate": 0.9}
        measured = run_load(job(url, **load), watch=watch)
    assert measured.stopped_by_errors
    assert measured.errors.total() < 100
    assert len(measured.rows) >= 250


def test_what_waits_for_a_place_when_the_drain_is_cut_was_never_sent(mock_server):
    spec = ArrivalSpec.steady(100.0, "constant")
    one = job(
        mock_server(fault="hang"), arrivals=spec, max_in_flight=1, num_requests=None, duration_s=0.2,
        drain_timeout_s=0.1, max_error_rate=None,
    )  # fmt: skip
    measured = run_load(one)
    assert (len(measured.rows), measured.num_never_sent) == (1, 19)


def test_a_wait_under_a_cap_is_told_apart_from_lateness(mock_server):
    spec = ArrivalSpec.steady(500.0, "constant")
    measured = run_load(job(mock_server(ttft_s=0.05), arrivals=spec, max_in_flight=2, num_requests=12))
    last = max(rows_of(measured), key=lambda row: row.due_s)
    assert last.place_wait_s > 0.1
    assert last.sent_s - last.due_s - last.place_wait_s - last.connect_s < 0.02
