import math

import pytest

from kvctl.core.request import FinishReason
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.llm import LLM
from kvctl.engine.model_source import ModelFacts
from kvctl.errors import ConfigError, InvalidRequest
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE, build_tokenizer
from tests.support.fakes import build_echo_core, engine_config


@pytest.fixture
def llm():
    generation_config = {"temperature": 0.3, "top_p": 0.8, "top_k": None, "max_length": 20}
    facts = ModelFacts(
        max_model_len=512, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS_ID,), generation_config=generation_config
    )
    return LLM.from_parts(engine_config(num_blocks=20), build_tokenizer(), facts, build_echo_core)


def params(**options):
    return SamplingParams(**({"max_tokens": 6} | options))


def test_texts_and_token_ids_are_completed_in_order(llm):
    results = llm.generate(["héy ", [97, 98], "x"], params())
    assert [result.text for result in results] == ["héy h", "ababab", "xxxxxx"]
    assert [result.prompt for result in results] == ["héy ", None, "x"]
    assert results[1].prompt_token_ids == [97, 98]
    assert results[1].token_ids == list(b"ababab")
    assert {result.finish_reason for result in results} == {FinishReason.LENGTH}


@pytest.mark.parametrize("prompts", ["ab", ["ab"], [97, 98], [[97, 98]]])
def test_one_prompt_needs_no_list_around_it(llm, prompts):
    (result,) = llm.generate(prompts, params())
    assert result.text == "ababab"


def test_nothing_in_nothing_out(llm):
    assert llm.generate([], params()) == []


def test_each_prompt_may_have_its_own_parameters(llm):
    results = llm.generate(["ab", "cd"], [params(max_tokens=1), params(max_tokens=3, stop=("c",))])
    assert [(result.text, result.finish_reason) for result in results] == [
        ("a", FinishReason.LENGTH),
        ("", FinishReason.STOP),
    ]
    assert results[1].completions[0].stop_reason == "c"
    with pytest.raises(ConfigError, match="2 prompts came with 1"):
        llm.generate(["ab", "cd"], [params()])


def test_without_parameters_the_models_own_defaults_hold(llm):
    default = llm.default_sampling_params
    assert (default.temperature, default.top_p, default.top_k, default.max_tokens) == (0.3, 0.8, 0, 256)
    (result,) = llm.generate("ab")
    assert len(result.token_ids) == 256


def test_children_come_with_their_request(llm):
    (result,) = llm.generate("ab", params(n=3, logprobs=0))
    assert [completion.text for completion in result.completions] == ["ababab"] * 3
    assert len(result.logprobs) == 6


def test_more_prompts_than_the_cache_holds_wait_their_turn(llm):
    results = llm.generate([f"{i:03} " * 10 for i in range(40)], params(max_tokens=50))
    assert [result.text[:3] for result in results] == [f"{i:03}" for i in range(40)]
    assert {len(result.token_ids) for result in results} == {50}


def test_a_prompt_seen_before_is_found_in_the_cache(llm):
    prompt = "x" * 40
    assert [llm.generate(prompt, params())[0].num_cached_tokens for _ in range(2)] == [0, 32]
    assert llm.recorder.counter("vllm:prefix_cache_hits").value == 32


def test_a_bad_prompt_among_good_ones_starts_nothing(llm):
    for bad in ("", [VOCAB_SIZE], "x" * 600):
        with pytest.raises(InvalidRequest):
            llm.generate(["good", bad], params())
    with pytest.raises(InvalidRequest, match="mixes"):
        llm.generate([97, "b"], params())
    assert llm.recorder.counter("kvctl:requests_accepted").value == 0
    assert llm.generate("ab", params())[0].text == "ababab"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_interruption_the_engine_is_empty_and_goes_on(llm, error, monkeypatch):
    step, steps = llm._core.step, []

    def interrupted():
        steps.append(1)
        if len(steps) == 3:
            raise error
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(error):
        llm.generate(["ab", "cd"], params())
    assert not llm._core.has_work()
    assert llm._core.scheduler.kv_cache_manager.pool.num_free_blocks == 19
    assert llm.generate("ef", params())[0].text == "efefef"


def test_what_can_never_fit_the_cache_is_refused_and_the_rest_is_ended(llm):
    with pytest.raises(InvalidRequest, match="KV cache"):
        llm.generate(["ab", "x" * 400], params(max_tokens=100))
    assert not llm._core.has_work()


def test_a_conversation_or_several_are_answered(llm):
    one = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(one, params(max_tokens=8))
    assert result.prompt == "<user>hi</s><assistant>"
    assert result.prompt_token_ids[8] == EOS_ID
    assert result.text == "<user>hi"[:8]
    assert [r.text for r in llm.chat([one, one], params(max_tokens=1))] == ["<", "<"]
    with pytest.raises(InvalidRequest):
        llm.chat([{"role": "user"}, {"content": 1}], params(), chat_template="{{ raise_exception('no') }}")


def test_more_than_the_models_own_length_is_refused(demo_folder):
    with pytest.raises(ConfigError, match="8193 is over the model's own length of 8192"):
        LLM(str(demo_folder), max_model_len=8193)


def test_the_demo_model_answers_through_the_public_name(demo_folder):
    import kvctl

    llm = kvctl.LLM(str(demo_folder), dtype="float32", max_model_len=256, num_gpu_blocks_override=40, num_threads=1)
    greedy = kvctl.SamplingParams(temperature=0, max_tokens=8, logprobs=2)
    (result,) = llm.generate("The capital of France is", greedy)
    assert result.text.startswith(" Paris")
    assert len(result.logprobs) == len(result.token_ids) == 8
    for token_id, logprobs in zip(result.token_ids, result.logprobs, strict=True):
        assert logprobs.token_ids[0] == token_id == logprobs.token_ids[1]
        assert logprobs.rank == 1
        assert math.exp(logprobs.logprobs[0]) <= 1
    (chat,) = llm.chat([{"role": "user", "content": "Say hello."}], greedy)
    assert "<|im_start|>user\nSay hello.<|im_end|>" in chat.prompt
    assert "Hello" in chat.text
