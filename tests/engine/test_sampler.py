"""The sampler against transformers' logits processors, scipy's chi-square and its own promises."""

import random

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.sampler import Sampler, SamplingBatch, SamplingRow, TorchSampling, select_sampling
from kvctl.engine.sampler_random import FIRST_CANDIDATES, race_noise, token_key

VOCAB = 2000


KERNELS = {"torch": TorchSampling(), "native": select_sampling("cpu", num_threads=1)}


def logits_rows(count, vocab=VOCAB, seed=0, scale=3.0):
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row(sampler, params, prompt=(1, 2, 3), output=(), eos=(0,)):
    return sampler.new_row(params, [*prompt, *output], len(prompt), eos)


def draw(params, logits, times, kernels="native", **kwargs):
    """Tokens of `times` requests that differ in seed only, from one row of logits."""
    sampler = Sampler(logits.shape[-1], kernels=KERNELS[kernels])
    rows = [row(sampler, params, **kwargs) for _ in range(times)]
    return np.array(sampler.sample(logits.expand(times, -1), SamplingBatch(rows)).token_ids)


def processed(params, logits, **kwargs):
    sampler = Sampler(logits.shape[-1])
    result = logits[0].clone()
    row(sampler, params, **kwargs).process(result)
    return result


def assert_follows(tokens, probabilities):
    """Chi-square over the tokens expected at least 5 times, the rest in one class."""
    expected = probabilities * len(tokens)
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a filtered token was drawn"
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    if expected[~common].sum() > 0:
        observed = np.append(observed, counts[~common].sum())
        wanted = np.append(wanted, expected[~common].sum())
    if len(wanted) > 1:
        assert scipy.stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-4


def warped(params, logits):
    """What transformers leaves of the distribution. min_p goes first, as in vLLM: top_p is a share of what it left."""
    scores = TemperatureLogitsWarper(params.temperature)(None, logits) if params.temperature != 1 else logits
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return torch.softmax(scores.double(), dim=-1)[0].numpy()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.8},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": FIRST_CANDIDATES},
        {"top_k": 300, "temperature": 2.0},
        {"top_k": 5000},
        {"top_p": 0.001},
        {"top_p": 0.5},
        {"top_p": 0.9999, "temperature": 2.0},
        {"min_p": 0.1},
        {"min_p": 1e-7, "temperature": 2.0},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 1500, "top_p": 0.99, "temperature": 2.0},
        {"min_p": 0.05, "top_p": 0.7},
        {"min_p": 1e-5, "top_p": 0.95, "top_k": 900, "temperature": 2.0},
    ],
)
@pytest.mark.parametrize("kernels", KERNELS)
def test_draws_follow_the_distribution_transformers_leaves(settings, kernels):
    params = SamplingParams(**settings)
    logits = logits_rows(1, vocab=VOCAB, seed=3)
    assert_follows(draw(params, logits, 2000, kernels), warped(params, logits))


@pytest.mark.parametrize("kernels", KERNELS)
def test_flat_and_tied_logits_keep_exactly_the_asked_share(kernels):
    flat = torch.zeros(1, 1000)
    assert set(draw(SamplingParams(top_k=3), flat, 200, kernels)) == {0, 1, 2}
    assert set(draw(SamplingParams(top_p=0.0995), flat, 3000, kernels)) == set(range(100))
    assert set(draw(SamplingParams(top_k=1), flat, 20, kernels)) == {0}


def test_top_k_of_one_is_greedy():
    logits = logits_rows(50)
    sampler = Sampler(VOCAB)
    rows = [row(sampler, SamplingParams(top_k=1, temperature=2.0)) for _ in range(50)]
    assert sampler.sample(logits, SamplingBatch(rows)).token_ids == logits.argmax(-1).tolist()


def test_noise_is_exponential_and_independent_between_keys_positions_and_tokens():
    keys = [token_key(seed, index) for seed in range(40) for index in range(5)]
    table = torch.tensor([(key & 0xFFFFFFFF, key >> 32) for key in keys])
    noise = race_noise(table, torch.arange(1000).unsqueeze(0)).double().numpy()
    uniform = np.exp(-np.exp(-noise))  # the Gumbel distribution function
    assert scipy.stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(uniform[:, :-1].ravel(), uniform[:, 1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(uniform[:-1].ravel(), uniform[1:].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(uniform[:-5].ravel(), uniform[5:].ravel())[0, 1]) < 0.01


def test_repetition_penalty_equals_transformers_over_prompt_and_output():
    logits = logits_rows(1)
    prompt, output = (5, 6, 6, 7), (8, 9, 9)
    want = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[*prompt, *output]]), logits.clone())[0]
    got = processed(SamplingParams(repetition_penalty=1.3), logits, prompt=prompt, output=output)
    assert torch.equal(got, want)


def test_presence_and_frequency_penalties_count_the_output_only():
    logits = logits_rows(1)
    got = processed(
        SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), logits, prompt=(5, 6), output=(6, 8, 8, 8)
    )
    want = logits[0].clone()
    want[6] -= 0.5 + 0.25 * 1
    want[8] -= 0.5 + 0.25 * 3
    assert torch.allclose(got, want)


def test_penalties_counted_step_by_step_equal_those_counted_at_once():
    rng = random.Random(1)
    params = SamplingParams(presence_penalty=0.3, frequency_penalty=0.1, repetition_penalty=1.2)
    sampler = Sampler(VOCAB)
    tokens = [rng.randrange(100) for _ in range(30)]
    growing = sampler.new_row(params, tokens, 30, ())
    for step in range(200):
        logits = logits_rows(1, seed=step)
        got, want = logits[0].clone(), logits[0].clone()
        growing.process(got)
        sampler.new_row(params, list(tokens), 30, ()).process(want)
        assert torch.equal(got, want)
        tokens.append(rng.randrange(150))


def test_bad_words_equal_transformers():
    words = [[7], [1, 9], [4, 5, 6], [2, 2, 2, 2, 2, 2, 2, 2, 2, 11]]
    for history in ([3, 1], [3, 4, 5], [4, 5], [5], [9, 4]):
        logits = logits_rows(1)
        want = NoBadWordsLogitsProcessor(words, eos_token_id=0)(torch.tensor([history]), logits.clone())[0]
        got = processed(
            SamplingParams(bad_words_token_ids=tuple(map(tuple, words))), logits, prompt=history[:1], output=history[1:]
        )
        assert torch.equal(got, want)


@pytest.mark.parametrize("num_output", [0, 4, 5, 6])
def test_min_tokens_equals_transformers(num_output):
    logits = logits_rows(1)
    prompt, output = [1, 2], [9] * num_output
    want = MinNewTokensLengthLogitsProcessor(2, 5, [0, 17], device="cpu")(
        torch.tensor([prompt + output]), logits.clone()
    )[0]
    params = SamplingParams(min_tokens=5, stop_token_ids=(17,))
    assert torch.equal(processed(params, logits, prompt=prompt, output=output, eos=(0,)), want)


def test_bias_and_allowed_tokens_equal_transformers():
    logits = logits_rows(1)
    ids = torch.tensor([[1, 2, 3]])
    bias = {4: 7.5, 9: -3.0, 100: 0.25}
    want = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})(ids, logits.clone())[0]
    assert torch.allclose(processed(SamplingParams(logit_bias=bias), logits), want)
    want = PrefixConstrainedLogitsProcessor(lambda *_: [3, 77, 4], num_beams=1)(ids, logits.clone())[0]
    assert torch.equal(processed(SamplingParams(allowed_token_ids=(3, 77, 4)), logits), want)


def in_vllms_order(params, logits, prompt, output, eos):
    """The whole chain as vLLM documents it, in plain Python: which tokens may be drawn, and how likely."""
    scores = logits.tolist()
    never = float("-inf")
    if params.allowed_token_ids:
        scores = [score if i in params.allowed_token_ids else never for i, score in enumerate(scores)]
    for word in params.bad_words_token_ids:
        if tuple([*prompt, *output][len(prompt) + len(output) - len(word) + 1 :]) == word[:-1]:
            scores[word[-1]] = never
    if len(output) < params.min_tokens:
        for token in (*eos, *params.stop_token_ids):
            scores[token] = never
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.temperature == 0:
        return {max(range(len(scores)), key=scores.__getitem__): 1.0}
    top = max(scores)
    weights = {i: np.exp((score - top) / params.temperature) for i, score in enumerate(scores) if score > never}
    kept = sorted((i for i in weights if weights[i] >= params.min_p), key=lambda i: (-weights[i], i))
    kept = kept[: params.top_k or None]
    total = sum(weights[i] for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if nucleus and mass >= params.top_p * total:
            break
        nucleus.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in nucleus}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("case", range(40))
def test_everything_together_happens_in_vllms_order(case, kernels):
    rng = random.Random(case)
    vocab = 60
    logits = logits_rows(1, vocab=vocab, seed=case)
    prompt = tuple(rng.randrange(vocab) for _ in range(rng.randrange(1, 9)))
    output = tuple(rng.randrange(vocab) for _ in range(rng.randrange(9)))
    params = SamplingParams(
        temperature=rng.choice([0, 0.3, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 6, 30]),
        top_p=rng.choice([1.0, 0.9, 0.4]),
        min_p=rng.choice([0.0, 0.02, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.4, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.6, -1.1]),
        presence_penalty=rng.choice([0.0, 1.2, -0.5]),
        logit_bias={rng.randrange(vocab): rng.choice([-4.0, 3.0]) for _ in range(rng.choice([0, 5]))},
        allowed_token_ids=tuple(rng.sample(range(vocab), 40)) if rng.random() < 0.4 else (),
        bad_words_token_ids=((rng.randrange(vocab),), ((*prompt, *output)[-1], rng.randrange(vocab))),
        min_tokens=rng.choice([0, 5]),
        stop_token_ids=(rng.randrange(vocab),),
    )
    want = np.zeros(vocab)
    for token, share in in_vllms_order(params, logits[0], prompt, output, (0,)).items():
        want[token] = share
    assert_follows(draw(params, logits, 400, kernels, prompt=prompt, output=output, eos=(0,)), want)


def test_ignored_eos_is_not_masked_by_min_tokens():
    logits = logits_rows(1)
    params = SamplingParams(min_tokens=5, ignore_eos=True)
    assert torch.equal(processed(params, logits, eos=(0,)), logits[0])


def test_bias_and_allowed_tokens():
    logits = torch.zeros(1, 50)
    assert set(draw(SamplingParams(allowed_token_ids=(3, 7)), logits, 100)) == {3, 7}
    assert set(draw(SamplingParams(logit_bias={4: 100.0}), logits, 50)) == {4}
    assert set(draw(SamplingParams(temperature=0, logit_bias={4: 1.0}), logits, 5)) == {4}
    assert 4 not in draw(SamplingParams(logit_bias={4: -100.0}), logits, 500)


def test_token_ids_outside_the_vocabulary_do_no_harm():
    params = SamplingParams(
        logit_bias={10**6: 5.0, -1: 3.0},
        allowed_token_ids=(5, 10**6),
        bad_words_token_ids=((10**6,), ()),
        stop_token_ids=(10**6,),
        min_tokens=2,
        repetition_penalty=1.1,
    )
    assert set(draw(params, torch.zeros(1, 50), 20, prompt=(10**6, 3), eos=(-4,))) == {5}


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}, {"temperature": 0}])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_row_with_everything_banned_still_gives_a_token(settings, kernels):
    every = SamplingParams(bad_words_token_ids=tuple((i,) for i in range(VOCAB)), **settings)
    assert 0 <= draw(every, logits_rows(1), 1, kernels)[0] < VOCAB


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"top_k": 5}, {"min_p": 0.5}, {"temperature": 0}])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ban", [{"bad_words_token_ids": ((5,), (9,))}, {"min_tokens": 9, "stop_token_ids": (5, 9)}])
def test_no_token_that_is_not_allowed_comes_even_if_all_others_are_banned(settings, kernels, ban):
    params = SamplingParams(allowed_token_ids=(5, 9), max_tokens=20, **ban, **settings)
    assert set(draw(params, logits_rows(1), 20, kernels)) == {5}


def random_params(rng):
    return SamplingParams(
        temperature=rng.choice([0, 0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 1, 5, 40, 200]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.999]),
        min_p=rng.choice([0.0, 0.0, 0.01]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        min_tokens=rng.choice([0, 3]),
        seed=rng.randrange(-(2**63), 2**63),
        logprobs=rng.choice([None, None, 0, 3]),
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_seeded_row_draws_the_same_whatever_else_is_in_the_batch(kernels):
    rng = random.Random(7)
    all_params = [random_params(rng) for _ in range(60)]
    logits = logits_rows(60, vocab=40_000)
    alone = []
    for i, params in enumerate(all_params):
        sampler = Sampler(40_000, seed=i, kernels=KERNELS[kernels])
        alone.append(sampler.sample(logits[i : i + 1], SamplingBatch([row(sampler, params)])))
    for trial in range(3):
        order = rng.sample(range(60), 60 if trial == 0 else 23)
        sampler = Sampler(40_000, seed=99, kernels=KERNELS[kernels])
        rows = [row(sampler, all_params[i]) for i in order]
        together = sampler.sample(logits[order], SamplingBatch(rows))
        assert together.token_ids == [alone[i].token_ids[0] for i in order]
        for position, i in enumerate(order):
            if all_params[i].logprobs is not None:
                assert together.logprobs[position] == alone[i].logprobs[0]


def test_unseeded_rows_differ_from_each_other_and_repeat_with_the_engine_seed():
    logits = torch.zeros(8, VOCAB)

    def tokens(seed):
        sampler = Sampler(VOCAB, seed=seed)
        return sampler.sample(logits, SamplingBatch([row(sampler, SamplingParams()) for _ in range(8)])).token_ids

    assert len(set(tokens(0))) > 6
    assert tokens(0) == tokens(0) != tokens(1)


def test_the_same_seed_gives_another_token_at_another_position():
    sampler = Sampler(VOCAB)
    rows = [row(sampler, SamplingParams(seed=5), output=[1] * i) for i in range(30)]
    assert len(set(sampler.sample(torch.zeros(30, VOCAB), SamplingBatch(rows)).token_ids)) > 25


def test_logprobs_are_raw_and_ranked():
    logits = logits_rows(3).bfloat16()
    sampler = Sampler(VOCAB)
    rows = [
        row(sampler, SamplingParams(temperature=0.5, logprobs=4, logit_bias={11: 100.0})),
        row(sampler, SamplingParams(temperature=0)),
        row(sampler, SamplingParams(temperature=0, logprobs=-1)),
    ]
    output = sampler.sample(logits, SamplingBatch(rows))
    want = torch.log_softmax(logits.double(), dim=-1)
    first, second, third = output.logprobs
    assert second is None
    assert first.token_ids[0] == output.token_ids[0] == 11
    assert first.logprobs[0] == pytest.approx(want[0, 11].item(), abs=1e-5)
    assert first.rank == int((want[0] > want[0, 11]).sum()) + 1
    assert first.logprobs[1:] == pytest.approx(want[0].topk(4).values.tolist(), abs=1e-5)
    assert len(third.token_ids) == VOCAB + 1
    assert third.rank == 1
    assert sorted(third.token_ids[1:]) == list(range(VOCAB))
    assert third.logprobs[1:] == sorted(third.logprobs[1:], reverse=True)


def test_sampling_leaves_the_logits_as_they_were():
    logits = logits_rows(2)
    before = logits.clone()
    sampler = Sampler(VOCAB)
    rows = [row(sampler, SamplingParams(temperature=0.3, repetition_penalty=1.5, top_p=0.9)) for _ in range(2)]
    sampler.sample(logits, SamplingBatch(rows))
    assert torch.equal(logits, before)


def test_an_all_greedy_batch_is_one_argmax():
    logits = logits_rows(5).bfloat16()
    sampler = Sampler(VOCAB)
    batch = SamplingBatch([row(sampler, SamplingParams(temperature=0)) for _ in range(5)])
    assert batch.is_plain_greedy
    assert isinstance(batch.rows[0], SamplingRow)
    output = sampler.sample(logits, batch)
    assert output.logprobs is None
    assert output.token_ids == logits.float().argmax(-1).tolist()
