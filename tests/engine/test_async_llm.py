"""AsyncLLM over a real engine process with the real core; only the model is a fake."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest

from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.async_llm import AsyncLLM, _Stream
from kvctl.engine.engine_process import spawn_engine
from kvctl.engine.request_output import RequestOutput
from kvctl.errors import EngineDead, InvalidRequest, ModelBroken
from kvctl.metrics.recorder import InMemoryRecorder
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE, build_tokenizer
from tests.support.fakes import engine_config

TOKENIZER = build_tokenizer()
SLOW = b"\x03slow"  # the fake engine takes 20 ms per token
RAISES, EXITS = b"\x01", b"\x02"


@contextlib.asynccontextmanager
async def running(builder="tests.support.fakes:build_echo_core", *, on_dead=None, on_report=None, **config):
    llm = await AsyncLLM.start(
        engine_config(**config),
        tokenizer=TOKENIZER,
        recorder=InMemoryRecorder(),
        eos_token_ids=frozenset({EOS_ID}),
        vocab_size=VOCAB_SIZE,
        spawned=spawn_engine(builder),
        on_dead=on_dead,
        on_report=on_report,
    )
    try:
        async with asyncio.timeout(30):
            yield llm
    finally:
        await llm.shutdown()
        assert not psutil.pid_exists(llm.engine_pid)


def generate(llm, prompt, request_id="r", **params):
    priority, cache_salt = params.pop("priority", 0), params.pop("cache_salt", None)
    sampling = SamplingParams(**({"max_tokens": 12} | params))
    return llm.generate(list(prompt), sampling, request_id=request_id, priority=priority, cache_salt=cache_salt)


async def collect(stream):
    return [output async for output in stream]


def text_of(outputs, index=0):
    return "".join(output.text_delta for output in outputs if output.index == index)


def counter(llm, name, **labels):
    return llm._metrics._recorder.counter(name, **labels).value


def gauge(llm, name):
    return llm._metrics._recorder.gauge(name).value


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_many_requests_stream_side_by_side():
    async with running() as llm:
        prompts = [f"prompt number {i} é".encode() for i in range(30)]
        results = await asyncio.gather(
            *(collect(generate(llm, p, f"r{i}", max_tokens=40)) for i, p in enumerate(prompts))
        )
        for prompt, outputs in zip(prompts, results, strict=True):
            expected = (prompt * 3)[:40]
            assert text_of(outputs) == expected.decode(errors="replace")
            assert [token for output in outputs for token in output.token_ids_delta] == list(expected)
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert outputs[-1].timeline.num_output_tokens == 40
            assert all(output.prompt_token_ids == list(prompt) for output in outputs)
        assert llm.num_unfinished == 0
        assert gauge(llm, "vllm:kv_cache_usage_perc") == 0
        assert counter(llm, "vllm:generation_tokens") == 30 * 40


async def test_it_reports_its_start_and_exposes_what_it_found():
    lines = []
    async with running(on_report=lines.append, max_model_len=300) as llm:
        assert lines == ["fake engine: no weights"]
        assert llm.info.max_model_len == 300
        assert llm.is_alive
        assert gauge(llm, "kvctl:max_model_len") == 300
        assert psutil.Process(llm.engine_pid).is_running()


async def test_eos_ends_the_request_unless_it_is_ignored():
    async with running() as llm:
        outputs = await collect(generate(llm, b"\x04ab", max_tokens=20))
        assert (text_of(outputs), outputs[-1].finish_reason) == ("\x04ab", FinishReason.STOP)
        assert outputs[-1].token_ids_delta[-1] == EOS_ID
        ignored = await collect(generate(llm, b"\x04ab", ignore_eos=True, max_tokens=6, skip_special_tokens=False))
        assert text_of(ignored).startswith("\x04ab</s>")
        assert ignored[-1].finish_reason is FinishReason.LENGTH


async def test_a_stop_string_ends_the_stream_and_the_engines_work():
    async with running() as llm:
        outputs = await collect(generate(llm, b"one two three ", stop=["two t"], max_tokens=400))
        assert (text_of(outputs), outputs[-1].stop_reason) == ("one ", "two t")
        await until(lambda: gauge(llm, "vllm:num_requests_running") == 0 == gauge(llm, "vllm:kv_cache_usage_perc"))
        assert counter(llm, "vllm:request_success", finished_reason="stop") == 1
        assert counter(llm, "vllm:request_success", finished_reason="abort") == 0


async def test_children_share_the_prompt_and_end_together():
    async with running() as llm:
        prompt = b"a prompt of more than one block of sixteen tokens"
        outputs = await collect(generate(llm, prompt, n=3, temperature=1.0, max_tokens=9))
        assert [text_of(outputs, index) for index in range(3)] == [prompt[:9].decode()] * 3
        assert sum(output.finished for output in outputs) == 1
        assert outputs[-1].finished
        assert sum(output.finish_reason is not None for output in outputs) == 3
        assert counter(llm, "vllm:prefix_cache_hits") == 2 * 48  # the twins found the first one's blocks
        assert llm.num_unfinished == 0


async def test_cached_tokens_are_told_and_a_salt_keeps_them_apart():
    async with running() as llm:
        prompt = b"x" * 40

        async def cached(**options):
            return (await collect(generate(llm, prompt, **options)))[-1].num_cached_tokens

        assert await cached() == 0
        assert await cached() == 32
        assert await cached(cache_salt="mine") == 0
        assert await cached(cache_salt="mine") == 32


async def test_logprobs_stay_parallel_to_tokens_through_merging():
    async with running() as llm:
        stream = generate(llm, b"abc", max_tokens=50, logprobs=0)
        first = await anext(stream)
        await until(lambda: llm.num_unfinished == 0)  # the engine is done before we read on
        outputs = [first, *await collect(stream)]
        tokens = [token for output in outputs for token in output.token_ids_delta]
        assert tokens == list((b"abc" * 17)[:50])
        assert [logprobs.token_ids[0] for output in outputs for logprobs in output.logprobs_delta] == tokens


async def test_a_slow_reader_gets_one_merged_output_not_a_queue():
    async with running() as llm:
        stream = generate(llm, b"abc", max_tokens=300)
        first = await anext(stream)
        await until(lambda: llm.num_unfinished == 0)
        rest = await collect(stream)
        assert len(rest) <= 2  # what was handed over with the first one, and one for all the rest
        assert text_of([first, *rest]) == "abc" * 100
        assert rest[-1].finished


async def test_a_slow_reader_of_children_gets_the_finished_one_last():
    async with running() as llm:
        stream = generate(llm, b"abc", n=4, max_tokens=50)
        first = await anext(stream)
        await until(lambda: llm.num_unfinished == 0)
        outputs = [first, *await collect(stream)]
        assert outputs[-1].finished
        assert all(len(text_of(outputs, index)) == 50 for index in range(4))


async def test_the_finished_output_is_the_last_also_where_its_child_was_the_first_to_wait():
    stream = _Stream()
    for index, text, finished in ((0, "a", False), (1, "b", False), (0, "c", True)):
        stream.put(RequestOutput("r", [1], index, text, finished=finished))
    assert [(output.index, output.text_delta, output.finished) for output in await stream.take()] == [
        (1, "b", False),
        (0, "ac", True),
    ]


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


# ---- what cannot be served ----


@pytest.mark.parametrize(
    ("prompt", "param"), [([], "prompt"), ([1] * 512, "input_tokens"), ([VOCAB_SIZE], "prompt"), ([-1], "prompt")]
)
async def test_a_bad_request_is_refused_before_the_stream_begins(prompt, param):
    async with running() as llm:
        with pytest.raises(InvalidRequest) as caught:
            generate(llm, prompt)
        assert caught.value.param == param
        assert llm.num_unfinished == 0


@pytest.mark.parametrize(
    "options", [{"priority": 2**70}, {"top_k": 2**70}, {"stop": ["\ud800"]}, {"cache_salt": "\udfff"}]
)
async def test_what_no_message_can_hold_is_the_callers_fault(options):
    async with running() as llm:
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            generate(llm, b"abc", **options)
        assert text_of(await collect(generate(llm, b"abc", max_tokens=3))) == "abc"


async def test_a_death_with_requests_on_the_way_is_still_called_by_its_name():
    async with running() as llm:
        os.kill(llm.engine_pid, signal.SIGSTOP)
        streams = [asyncio.ensure_future(collect(generate(llm, b"x" * 500, f"r{i}"))) for i in range(400)]
        await asyncio.sleep(0.1)  # the socket is full, the rest waits on this side
        os.kill(llm.engine_pid, signal.SIGKILL)
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert {str(result).partition("\n")[0] for result in results} == {"the engine process was killed by SIGKILL"}


async def test_an_id_in_use_is_refused_and_the_first_one_goes_on():
    async with running() as llm:
        stream = generate(llm, SLOW, max_tokens=5)
        await anext(stream)
        with pytest.raises(InvalidRequest, match="in use"):
            generate(llm, b"abc")
        late = generate(llm, b"abc", "other")
        twin = generate(llm, b"abc", "other")  # neither has begun
        assert len(await collect(late)) >= 1
        assert text_of(await collect(twin)) == "abcabcabcabc"  # its id is free again
        assert (await collect(stream))[-1].finish_reason is FinishReason.LENGTH


async def test_what_can_never_fit_the_cache_is_refused_at_once_and_others_go_on():
    async with running(num_blocks=5) as llm:
        slow = asyncio.ensure_future(collect(generate(llm, SLOW, "slow", max_tokens=10)))
        with pytest.raises(InvalidRequest, match="KV cache") as caught:
            await collect(generate(llm, b"x" * 200, n=2))
        assert "kv-cache-memory-bytes" in caught.value.hint
        assert (await slow)[-1].finish_reason is FinishReason.LENGTH
        assert counter(llm, "vllm:request_success", finished_reason="error") == 2


async def test_a_request_the_core_trips_over_is_refused_and_others_go_on():
    async with running("tests.support.fakes:build_picky_core") as llm:
        slow = asyncio.ensure_future(collect(generate(llm, SLOW, "slow", max_tokens=10)))
        with pytest.raises(InvalidRequest, match="not this one"):
            await collect(generate(llm, b"abc", "refused"))
        with pytest.raises(Exception, match="TypeError: a bug while adding"):
            await collect(generate(llm, b"abc", "bug"))
        assert (await slow)[-1].finish_reason is FinishReason.LENGTH
        assert llm.is_alive


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
    uvloop = pytest.importorskip("uvloop")

    async def main():
        async with running() as llm:
            assert text_of(await collect(generate(llm, b"abc"))) == "abcabcabcabc"
            os.kill(llm.engine_pid, signal.SIGKILL)
            await until(lambda: not llm.is_alive)

    uvloop.run(main())


def test_a_blocked_event_loop_does_not_lose_output():
    async def main():
        async with running() as llm:
            stream = generate(llm, b"abc", max_tokens=400)
            first = await anext(stream)
            time.sleep(0.3)
            outputs = [first, *await collect(stream)]
            assert sum(len(output.token_ids_delta) for output in outputs) == 400

    asyncio.run(main())
