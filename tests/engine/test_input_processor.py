import pytest

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.input_processor import InputProcessor
from kvctl.errors import InvalidRequest
from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE, build_tokenizer
from tests.support.fakes import build_echo_core, engine_config


@pytest.fixture(scope="module")
def inputs():
    _, info = build_echo_core(engine_config(max_model_len=64), lambda: 0.0, lambda line: None)
    return InputProcessor(info, build_tokenizer(), eos_token_ids=frozenset({EOS_ID}), vocab_size=VOCAB_SIZE)


def process(inputs, prompt=(1, 2, 3), **params):
    return inputs.process("r", prompt, SamplingParams(**params), arrival_s=1.5, priority=3, cache_salt="salt")


def test_a_request_is_passed_on_with_all_that_belongs_to_it(inputs):
    (request,) = process(inputs, max_tokens=5)
    assert (request.request_id, request.prompt_token_ids, request.arrival_s) == ("r", [1, 2, 3], 1.5)
    assert (request.priority, request.cache_salt, request.eos_token_ids) == (3, "salt", frozenset({EOS_ID}))


def test_children_differ_in_seed_and_the_first_alone_reads_the_prompt(inputs):
    children = process(inputs, n=3, seed=2**63 - 2, prompt_logprobs=1)
    assert [child.request_id for child in children] == ["r_0", "r_1", "r_2"]
    assert [child.sampling_params.seed for child in children] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert [child.sampling_params.n for child in children] == [1, 1, 1]
    assert [child.sampling_params.prompt_logprobs for child in children] == [1, None, None]
    assert [child.sampling_params.seed for child in process(inputs, n=2)] == [None, None]


def test_the_output_is_cut_to_what_the_model_leaves(inputs):
    (request,) = process(inputs, prompt=[1] * 60, max_tokens=100, min_tokens=50)
    assert (request.sampling_params.max_tokens, request.sampling_params.min_tokens) == (4, 4)


@pytest.mark.parametrize("length", [64, 65, 10_000])
def test_a_prompt_that_leaves_no_room_is_refused(inputs, length):
    with pytest.raises(InvalidRequest, match=f"{length} tokens.*64") as caught:
        process(inputs, prompt=[1] * length)
    assert caught.value.param == "input_tokens"
    assert caught.value.hint


def test_an_empty_prompt_is_refused(inputs):
    with pytest.raises(InvalidRequest, match="no tokens"):
        process(inputs, prompt=[])


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 10**12])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", lambda i: [1, i]),
        ("stop_token_ids", lambda i: (i,)),
        ("allowed_token_ids", lambda i: (1, i)),
        ("logit_bias", lambda i: {i: 1.0}),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_named(inputs, field, value, wrong):
    with pytest.raises(InvalidRequest, match=f"token id {wrong} ") as caught:
        process(inputs, **{field: value(wrong)})
    assert caught.value.param == field


def test_the_last_id_of_the_vocabulary_is_fine(inputs):
    process(inputs, prompt=[VOCAB_SIZE - 1, 0], logit_bias={VOCAB_SIZE - 1: 1.0})


def test_bad_words_that_would_hold_everybody_up_are_refused(inputs):
    with pytest.raises(InvalidRequest, match="16385 characters") as caught:
        process(inputs, bad_words=("w" * 16_384, "v"))
    assert caught.value.param == "bad_words"
    process(inputs, bad_words=("w" * 16_384,))


def test_bad_words_become_tokens_with_and_without_a_space(inputs):
    (request,) = process(inputs, bad_words=("ab", " ab"))
    assert set(request.sampling_params.bad_words_token_ids) == {tuple(b"ab"), tuple(b" ab")}


def test_too_many_children_are_refused(inputs):
    with pytest.raises(InvalidRequest, match="at most"):
        process(inputs, n=20_000)
