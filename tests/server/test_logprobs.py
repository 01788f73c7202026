import math

import pytest

from kvctl.core.step import TokenLogprobs
from kvctl.server.logprobs import LogprobFormatter, TokenTexts, shape_prompt_logprobs, token_bytes
from tests.support.byte_tokenizer import build_tokenizer


@pytest.fixture
def texts():
    tokenizer = build_tokenizer()
    return TokenTexts(tokenizer.token_text, tokenizer.backend.id_to_token)


def test_the_bytes_of_half_a_character_are_its_own(texts):
    assert [texts(byte)[1] for byte in "é".encode()] == [[0xC3], [0xA9]]
    assert texts(ord("a")) == ("a", [97]) and texts(32) == (" ", [32])


@pytest.mark.parametrize(
    ("piece", "text", "expected"),
    [
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("Ã", "\ufffd", b"\xc3"),
        ("日本", "日本", "日本".encode()),
        ("▁x\ufffd", "\ufffd", b"\xef\xbf\xbd"),
    ],
)
def test_bytes_come_from_byte_fallback_byte_level_or_the_text(piece, text, expected):
    assert token_bytes(piece, text) == expected


def test_every_byte_of_the_byte_level_alphabet_is_known(texts):
    assert [bytes(texts(byte)[1]) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_impossible_tokens_read_minus_9999(texts):
    position = TokenLogprobs([97, 98], [-math.inf, -0.1], 5)
    shaped = LogprobFormatter(texts, num_top=1).completion([97], [position])
    assert shaped["token_logprobs"] == [-9999.0] and shaped["top_logprobs"] == [{"a": -9999.0, "b": -0.1}]
    assert LogprobFormatter(texts, num_top=1).chat([position])["content"][0]["logprob"] == -9999.0
    assert shape_prompt_logprobs([None, position], texts) == [
        None,
        {
            "97": {"logprob": -9999.0, "rank": 5, "decoded_token": "a"},
            "98": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        },
    ]


def test_chat_shows_the_chosen_token_and_as_many_others_as_asked_for(texts):
    position = TokenLogprobs([99, 97, 98, 99], [-3.0, -0.5, -1.0, -3.0], 3)
    [entry] = LogprobFormatter(texts, num_top=2).chat([position])["content"]
    assert entry["token"] == "c" and [top["token"] for top in entry["top_logprobs"]] == ["a", "b"]
    [entry] = LogprobFormatter(texts, num_top=-1).chat([position])["content"]
    assert len(entry["top_logprobs"]) == 3


def test_completions_name_the_chosen_token_beside_the_top_ones(texts):
    position = TokenLogprobs([99, 97, 98], [-3.0, -0.5, -1.0], 3)
    shaped = LogprobFormatter(texts, num_top=2).completion([99], [position])
    assert shaped["top_logprobs"] == [{"c": -3.0, "a": -0.5, "b": -1.0}]


def test_of_tokens_that_read_the_same_the_chosen_one_is_shown(texts):
    halves = [0xC3, 0xE2, 0xF0]  # each the first byte of a character: all read U+FFFD
    position = TokenLogprobs([halves[1], *halves], [-0.5, -0.4, -0.5, -7.0], 2)
    shaped = LogprobFormatter(texts, num_top=3).completion([halves[1]], [position])
    assert shaped["token_logprobs"] == [-0.5]
    assert shaped["top_logprobs"] == [{"\ufffd": -0.5}]  # the chosen one first
    as_ids = LogprobFormatter(texts, num_top=3, as_ids=True).completion([halves[1]], [position])
    assert as_ids["top_logprobs"] == [{"token_id:226": -0.5, "token_id:195": -0.4, "token_id:240": -7.0}]
