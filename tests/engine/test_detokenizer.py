import re
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from kvctl.engine.detokenizer import IncrementalDetokenizer, StopStringMatcher
from tests.support import byte_tokenizer, fakes

BYTES = byte_tokenizer.build_backend()
PIECES = fakes.sentencepiece_like_backend()
BYTE_0 = 3  # id of <0x00> there


def train_bpe() -> tokenizers.Tokenizer:
    """A byte-level BPE whose merges cut characters in the middle, as large vocabularies do."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    backend.train_from_iterator(["你好 世界 hello 🎉🎊 naïve café ﷽ Größe 日本語 " * 3, "def f(x): return x"], trainer)
    return backend


BPE = train_bpe()
SPECIAL = {BYTES: {256, 257, 258}, BPE: {0}}


def pieces(backend, token_ids, prompt=(), *, skip_special_tokens=True):
    detokenizer = IncrementalDetokenizer(backend, prompt, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def one_mark(text):
    return re.sub("\ufffd+", "\ufffd", text)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([BYTES, BPE]), st.data(), st.booleans())
def test_pieces_of_any_tokens_are_the_whole_decoding(backend, data, skip):
    ids = data.draw(st.lists(st.integers(0, backend.get_vocab_size() - 1), max_size=60))
    text = "".join(pieces(backend, ids, skip_special_tokens=skip))
    whole = backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" in whole:  # a broken character may come out as one mark or as several, but one for each byte at most
        num_bytes = sum(len(backend.id_to_token(i)) for i in ids if not (skip and i in SPECIAL[backend]))
        assert text.count("\ufffd") <= num_bytes - len(whole.replace("\ufffd", "").encode())
        assert one_mark(text) == one_mark(whole)
    else:
        assert text == whole


@settings(max_examples=120, deadline=None)
@given(st.sampled_from([BYTES, BPE]), st.text(max_size=40), st.text(max_size=8))
def test_valid_text_never_shows_a_replacement_mark(backend, text, prompt):
    text, prompt = text.replace("\ufffd", ""), prompt.replace("\ufffd", "")
    shown = pieces(backend, backend.encode(text).ids, backend.encode(prompt).ids)
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(st.integers(259, PIECES.get_vocab_size() - 1), st.sampled_from("éü你🎉a ")), max_size=40))
def test_byte_fallback_characters_come_out_whole(parts):
    ids = [
        token_id
        for part in parts
        for token_id in ([part] if isinstance(part, int) else [BYTE_0 + byte for byte in part.encode()])
    ]
    assert "".join(pieces(PIECES, ids)) == PIECES.decode(ids)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, PIECES.get_vocab_size() - 1), max_size=60))
def test_invalid_byte_fallback_neither_raises_nor_stalls(ids):
    detokenizer = IncrementalDetokenizer(PIECES, (), skip_special_tokens=True)
    silent = 0
    for token_id in ids:
        silent = 0 if detokenizer.push(token_id) or token_id < BYTE_0 else silent + 1
        assert silent <= 8
    letters = iter("".join(pieces(PIECES, ids)))
    wanted = "".join(PIECES.id_to_token(token_id) for token_id in ids if token_id >= 259).replace("▁", "")
    assert all(letter in letters for letter in wanted)  # every letter of a whole piece comes out, in order


def test_a_character_over_four_tokens_is_held_back_until_it_is_whole():
    assert pieces(BYTES, "a🎉b".encode()) == ["a", "", "", "", "🎉", "b", ""]


def test_a_long_run_of_broken_bytes_comes_out_and_the_character_after_it_is_whole():
    shown = pieces(BYTES, b"\xff" * 7 + "你好".encode())
    assert "".join(shown) == "\ufffd" * 7 + "你好"
    assert shown[7]  # eight tokens are the most that is ever held back


def test_an_unfinished_character_at_the_end_is_one_mark():
    assert pieces(BYTES, b"a\xe4\xbd") == ["a", "", "", "\ufffd"]


def test_a_completion_keeps_the_space_that_follows_the_prompt():
    prompt = [PIECES.token_to_id("▁hello")]
    assert pieces(PIECES, [PIECES.token_to_id("▁world")], prompt) == [" world", ""]
    assert pieces(PIECES, [PIECES.token_to_id("▁world")]) == ["world", ""]


def test_a_completion_finishes_the_character_that_the_prompt_began():
    assert "".join(pieces(BYTES, b"\x8e\x89!", list("x🎉".encode())[:-2])) == "🎉!"


@pytest.mark.parametrize("end", ["\ufffd".encode(), b"\xe4\xbd", b"\xff"])
def test_a_mark_that_stands_in_the_prompt_is_not_said_again(end):
    assert "".join(pieces(BYTES, b"ok", list(b"see " + end))) == "ok"


def test_special_tokens_are_shown_only_on_request():
    ids = [*b"hi", byte_tokenizer.EOS_ID]
    assert "".join(pieces(BYTES, ids)) == "hi"
    assert "".join(pieces(BYTES, ids, skip_special_tokens=False)) == "hi</s>"


def test_ids_that_no_token_has_give_nothing():
    assert "".join(pieces(BYTES, [104, 100_000, 105])) == "hi"


# ---- stop strings ----


def run_matcher(parts, stops, *, include=False):
    matcher = StopStringMatcher(stops, include_in_output=include)
    shown = []
    for part in parts:
        text, stop = matcher.push(part)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, matcher.flush()], None


def first_stop(text, stops):
    """What a person would say: go through the text letter by letter; the first stop that is complete, the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None, len(text)


def cut(text, at):
    bounds = [0, *sorted(i for i in set(at) if i < len(text)), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


@settings(max_examples=250, deadline=None)
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 30), max_size=8),
    st.booleans(),
)
def test_the_result_does_not_depend_on_how_the_text_is_cut(text, stops, at, include):
    stop, end = first_stop(text, stops)
    expected = text[:end] if stop is None or include else text[: end - len(stop)]
    shown, found = run_matcher(cut(text, at), stops, include=include)
    assert found == stop
    assert "".join(shown) == expected


@settings(max_examples=120, deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_start_a_stop_string(text, stops):
    matcher = StopStringMatcher(stops, include_in_output=False)
    shown = ""
    for position, letter in enumerate(text):
        piece, stop = matcher.push(letter)
        if stop is not None:
            return
        shown += piece
        held = text[len(shown) : position + 1]
        assert not held or any(stop_string.startswith(held) for stop_string in stops)


def test_a_stop_string_over_three_pieces_is_never_shown():
    assert run_matcher(["Hi", "\nUs", "er", ": x"], ["\nUser:"]) == (["Hi", "", "", ""], "\nUser:")


def test_a_false_start_is_shown_as_soon_as_it_is_one():
    assert run_matcher(["a\n", "\n", "b"], ["\n\nEND"]) == (["a", "", "\n\nb", ""], None)


def test_a_stop_string_that_ends_too_early_does_not_count():
    matcher = StopStringMatcher(["b"], include_in_output=False)
    assert matcher.push("ab", may_stop=False) == ("ab", None)
    assert matcher.push("cb") == ("c", "b")


def test_a_stop_string_that_ends_late_counts_from_its_start():
    matcher = StopStringMatcher(["xyz"], include_in_output=False)
    assert matcher.push("axy", may_stop=False) == ("a", None)
    assert matcher.push("z!") == ("", "xyz")
