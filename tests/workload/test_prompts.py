"""Prompts without a tokenizer: their lengths under counting rules of several kinds, and what they share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.workload.prompts import WORDS, PromptMaker, TokenRate


def test_words_are_different_and_plain():
    assert len(set(WORDS)) == len(WORDS) > 100
    assert all(word.isalpha() and word.islower() for word in WORDS)


@given(st.integers(1, 5000))
def test_a_text_has_the_words_asked_for(num_words):
    assert len(PromptMaker(3).unique(num_words).split(" ")) == num_words


@given(st.integers(1, 700), st.integers(0, 1000))
def test_equal_lengths_hold_equal_words(num_words, seed):
    """So they cost equal tokens wherever a word costs the same at every place."""
    maker = PromptMaker(seed)
    assert sorted(maker.unique(num_words).split()) == sorted(maker.keyed("a", num_words).split())


def test_unique_texts_do_not_share_a_beginning():
    maker = PromptMaker(1)
    beginnings = [" ".join(maker.unique(200).split()[:8]) for _ in range(3000)]
    assert len(set(beginnings)) == 3000


def test_a_key_is_a_text_for_all_makers_of_one_seed():
    assert PromptMaker(1).keyed(("block", 7), 50) == PromptMaker(1).keyed(("block", 7), 50)
    assert PromptMaker(2, key_seed=1).keyed("x", 50) == PromptMaker(1).keyed("x", 50)
    assert PromptMaker(1).keyed("x", 50) != PromptMaker(2).keyed("x", 50)
    assert PromptMaker(1).keyed("x", 50) != PromptMaker(1).keyed("y", 50)


def test_one_seed_one_sequence():
    first, second = PromptMaker(5), PromptMaker(5)
    assert [first.unique(40) for _ in range(5)] == [second.unique(40) for _ in range(5)]


def count_bpe(text, overhead):
    """One token a word, and one for a full stop: how byte-pair vocabularies split this text."""
    return overhead + len(text.split()) + text.count(".")


def count_by_length(text, overhead):
    """A poor vocabulary: each word costs by its letters."""
    return overhead + sum(2 if word.strip(".")[0] < "m" else 1 for word in text.split()) + text.count(".")


@pytest.mark.parametrize("count", [count_bpe, count_by_length])
@pytest.mark.parametrize("overhead", [0, 13])
@pytest.mark.parametrize("wanted", [64, 512, 1000])
def test_two_probes_and_two_corrections_make_lengths_exact(count, overhead, wanted):
    maker = PromptMaker(0)
    one, two = len(WORDS), 2 * len(WORDS)
    rate = TokenRate.from_probes((one, count(maker.unique(one), overhead)), (two, count(maker.unique(two), overhead)))
    words = rate.words_below(wanted)
    for _ in range(2):
        if not rate.is_one_token_per_word and not rate.is_exact_at(wanted):
            rate = rate.verified(words, count(maker.unique(words), overhead))
            words = rate.words_near_verified(wanted)
    maker = PromptMaker(1, rate)
    assert {count(maker.prompt(wanted), overhead) for _ in range(20)} == {wanted}


def test_probes_that_make_no_sense_teach_nothing():
    assert TokenRate.from_probes((10, 5), (10, 5)) is None
    assert TokenRate.from_probes((10, 9), (20, 9)) is None
