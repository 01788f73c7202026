"""How streams and the engine behind them end: readers that leave, an engine that dies, hangs or is shut down."""

import asyncio
import os
import signal

import psutil
import pytest

from kvctl.core.request import FinishReason
from kvctl.errors import EngineDead, ModelBroken
from tests.support.async_llms import EXITS, RAISES, SLOW, collect, counter, gauge, generate, running, text_of, until

# ---- ending early ----


@pytest.mark.parametrize("how", ["close", "cancel", "break", "abort"])
async def test_leaving_a_stream_aborts_and_frees_the_blocks(how):
    async with running() as llm:
        stream = generate(llm, SLOW * 10, n=2, max_tokens=400)
        await anext(stream)
        await until(lambda: gauge(llm, "vllm:kv_cache_usage_perc") > 0)
        match how:
            case "close":
                await stream.aclose()
            case "cancel":
                task = asyncio.ensure_future(collect(stream))
                await asyncio.sleep(0.05)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            case "break":
                async for _ in stream:
                    break
                del stream
            case "abort":
                llm.abort("r")
                outputs = await collect(stream)
                assert outputs[-1].finished
                assert outputs[-1].finish_reason is FinishReason.ABORT
        await until(lambda: llm.num_unfinished == 0)
        await until(lambda: gauge(llm, "vllm:kv_cache_usage_perc") == 0 == gauge(llm, "vllm:num_requests_running"))
        assert counter(llm, "vllm:request_success", finished_reason="abort") == 2
        assert text_of(await collect(generate(llm, b"next"))) == "nextnextnext"


async def test_a_stream_that_is_never_read_costs_nothing():
    async with running() as llm:
        stream = generate(llm, b"abc")
        assert llm.num_unfinished == 0
        await stream.aclose()
        assert counter(llm, "kvctl:requests_accepted") == 0


async def test_aborting_what_is_not_there_does_nothing():
    async with running() as llm:
        llm.abort("nobody")
        assert text_of(await collect(generate(llm, b"abc", max_tokens=3))) == "abc"
        llm.abort("r")


# ---- the end of the engine ----


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", "killed by SIGKILL"),
        ("raises", "RuntimeError: the runner was asked to fail"),
        ("exits", "exit code 9"),
    ],
)
async def test_when_the_engine_dies_every_stream_raises_and_the_owner_hears_it_once(how, words):
    deaths = []
    async with running(on_dead=deaths.append) as llm:
        streams = [asyncio.ensure_future(collect(generate(llm, SLOW, f"r{i}", max_tokens=400))) for i in range(5)]
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 5)
        match how:
            case "SIGKILL":
                os.kill(llm.engine_pid, signal.SIGKILL)
            case "raises":
                streams.append(asyncio.ensure_future(collect(generate(llm, RAISES, "bad"))))
            case "exits":
                streams.append(asyncio.ensure_future(collect(generate(llm, EXITS, "bad"))))
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDead}
        assert all(words in str(result) for result in results)
        assert not llm.is_alive
        assert llm.num_unfinished == 0
        assert deaths == [results[0]]
        with pytest.raises(EngineDead):
            generate(llm, b"abc")
        assert gauge(llm, "vllm:num_requests_running") == 0
        accepted = counter(llm, "kvctl:requests_accepted")
        assert counter(llm, "vllm:request_success", finished_reason="error") == accepted == len(streams)
    assert len(deaths) == 1


async def test_a_death_with_requests_on_the_way_is_still_called_by_its_name():
    async with running() as llm:
        os.kill(llm.engine_pid, signal.SIGSTOP)
        streams = [asyncio.ensure_future(collect(generate(llm, b"x" * 500, f"r{i}"))) for i in range(400)]
        await asyncio.sleep(0.1)  # the socket is full, the rest waits on this side
        os.kill(llm.engine_pid, signal.SIGKILL)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {str(result).partition("\n")[0] for result in results} == {"the engine process was killed by SIGKILL"}


async def test_a_reader_gets_the_text_that_was_there_before_the_death():
    async with running() as llm:
        stream = generate(llm, SLOW, max_tokens=400)
        await anext(stream)
        await asyncio.sleep(0.1)
        os.kill(llm.engine_pid, signal.SIGKILL)
        await until(lambda: not llm.is_alive and llm.num_unfinished == 0)
        assert text_of([await anext(stream)])
        with pytest.raises(EngineDead):
            await anext(stream)


@pytest.mark.parametrize(
    ("folder", "kind", "words"),
    [
        ("broken", ModelBroken, "model.safetensors is missing"),
        ("bug", EngineDead, "ZeroDivisionError"),
        ("crash", EngineDead, "exit code 7"),
    ],
)
async def test_a_failed_start_raises_what_the_engine_raised(folder, kind, words):
    deaths = []
    with pytest.raises(kind, match=words):
        async with running(folder=folder, on_dead=deaths.append):
            pass
    assert deaths == []
    assert [child for child in psutil.Process().children() if "engine_process" in " ".join(child.cmdline())] == []


async def test_a_start_that_is_cancelled_leaves_no_process():
    task = asyncio.ensure_future(running(folder="slow").__aenter__())
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [child for child in psutil.Process().children() if "engine_process" in " ".join(child.cmdline())] == []


# ---- an engine that does not get on ----


async def test_a_stopped_engine_is_noticed_and_so_is_that_it_gets_on_again(caplog):
    caplog.set_level("INFO", "kvctl.engine.async_llm")
    async with running(stall_timeout_s=0.3) as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=20)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await until(lambda: llm.stall is not None)
        assert "has not finished a step for" in llm.stall
        assert llm.is_alive
        await until(lambda: any("--engine-stall-timeout" in line for line in caplog.messages))
        os.kill(llm.engine_pid, signal.SIGCONT)
        assert (await stream)[-1].finish_reason is FinishReason.LENGTH  # nothing was lost
        assert llm.stall is None
        await until(lambda: "the engine gets on again" in caplog.messages)
        await asyncio.sleep(0.5)
        assert llm.stall is None  # it owes nothing


async def test_a_stopped_engine_is_noticed_although_its_clients_give_up():
    async with running(stall_timeout_s=0.3) as llm:
        os.kill(llm.engine_pid, signal.SIGSTOP)
        for number in range(8):
            stream = asyncio.ensure_future(collect(generate(llm, b"abc", f"r{number}")))
            await asyncio.sleep(0.05)
            stream.cancel()
        await until(lambda: llm.num_unfinished == 0)
        await until(lambda: llm.stall is not None)
        os.kill(llm.engine_pid, signal.SIGCONT)
        await until(lambda: llm.stall is None)


async def test_an_engine_that_says_it_failed_but_cannot_end_is_dead_all_the_same(monkeypatch):
    monkeypatch.setattr("kvctl.engine.engine_client._EXIT_CODE_WAIT_S", 0.2)
    deaths = []
    async with running("tests.support.fakes:build_lingering_core", on_dead=deaths.append) as llm:
        with pytest.raises(EngineDead, match="the runner was asked to fail"):
            await collect(generate(llm, RAISES))
        assert len(deaths) == 1


# ---- shutdown ----


async def test_a_shutdown_without_drain_aborts():
    async with running() as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=400)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        await llm.shutdown()
        assert (await stream)[-1].finish_reason is FinishReason.ABORT
        assert not llm.is_alive
        with pytest.raises(EngineDead, match="shutting down"):
            generate(llm, b"abc")


async def test_a_drain_lets_running_requests_finish_and_takes_no_new_ones():
    deaths = []
    async with running(on_dead=deaths.append) as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=15)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        closing = asyncio.ensure_future(llm.shutdown(drain_s=20))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead, match="shutting down"):
            generate(llm, b"abc", "new")
        assert (await stream)[-1].finish_reason is FinishReason.LENGTH
        await closing
    assert deaths == []


async def test_a_drain_that_takes_too_long_ends_in_aborts():
    async with running() as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=400)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        await llm.shutdown(drain_s=0.1)
        assert (await stream)[-1].finish_reason is FinishReason.ABORT


async def test_a_second_shutdown_cuts_the_first_ones_drain_short():
    async with running() as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=400)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        first = asyncio.ensure_future(llm.shutdown(drain_s=1000))
        await asyncio.sleep(0.05)
        await asyncio.gather(llm.shutdown(), first)
        assert (await stream)[-1].finish_reason is FinishReason.ABORT


async def test_an_engine_that_hangs_is_killed_at_shutdown(monkeypatch):
    monkeypatch.setattr("kvctl.engine.engine_client._STOP_WAIT_S", 0.2)
    async with running() as llm:
        os.kill(llm.engine_pid, signal.SIGSTOP)
        await llm.shutdown()
        assert not psutil.pid_exists(llm.engine_pid)


async def test_a_drain_ends_when_the_engine_dies():
    async with running() as llm:
        stream = asyncio.ensure_future(collect(generate(llm, SLOW, max_tokens=400)))
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 1)
        closing = asyncio.ensure_future(llm.shutdown(drain_s=1000))
        await asyncio.sleep(0.05)
        os.kill(llm.engine_pid, signal.SIGKILL)
        await closing
        with pytest.raises(EngineDead):
            await stream


def test_it_runs_on_uvloop_too():
    import uvloop  # a dependency on Linux and macOS

    async def main():
        async with running() as llm:
            assert text_of(await collect(generate(llm, b"abc"))) == "abcabcabcabc"
            os.kill(llm.engine_pid, signal.SIGKILL)
            await until(lambda: not llm.is_alive)

    uvloop.run(main())
