"""AsyncLLM over a real engine process with the real core; only the model is a fake: what its streams say."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from kvctl.core.request import FinishReason
from kvctl.engine.async_llm import _Stream
from kvctl.engine.request_output import RequestOutput
from kvctl.errors import InvalidRequest
from tests.support.async_llms import SLOW, collect, counter, gauge, generate, running, text_of, until
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE


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


def test_a_blocked_event_loop_does_not_lose_output():
    async def main():
        async with running() as llm:
            stream = generate(llm, b"abc", max_tokens=400)
            first = await anext(stream)
            time.sleep(0.3)
            outputs = [first, *await collect(stream)]
            assert sum(len(output.token_ids_delta) for output in outputs) == 400

    asyncio.run(main())


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


async def test_late_outputs_of_an_aborted_request_are_not_for_the_next_one_of_its_id():
    async with running() as llm:
        first = generate(llm, b"\x03first request", max_tokens=400)
        await anext(first)
        os.kill(llm.engine_pid, signal.SIGSTOP)  # it has not read of the abort when the id comes again
        await first.aclose()
        second = asyncio.ensure_future(collect(generate(llm, b"other", max_tokens=10)))
        await asyncio.sleep(0.05)
        os.kill(llm.engine_pid, signal.SIGCONT)
        assert text_of(await second) == "otherother"


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
