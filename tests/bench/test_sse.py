"""Server-sent events, in every way they may be written and cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.bench.sse import SseParser

TEXTS = [b'{"a": 1}', b"[DONE]", b"", b" spaced ", "ünï".encode(), b"data: inner"]


def feed_in_pieces(stream, cuts):
    parser, events = SseParser(), []
    places = [0, *sorted(cuts), len(stream)]
    for start, end in pairwise(places):
        events += parser.feed(stream[start:end])
    return events


@given(
    st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.booleans(),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_any_line_end_cut_anywhere_gives_the_same_events(texts, end, has_space, cuts):
    start = b"data: " if has_space else b"data:"
    stream = b"".join(start + text + end + end for text in texts)
    expected = texts if has_space else [text.removeprefix(b" ") for text in texts]
    # An event that ends with CR is only known to be over when the next byte is no LF; the texts are the same.
    assert feed_in_pieces(stream, [cut for cut in cuts if cut < len(stream)]) == expected


def test_byte_by_byte_is_the_same_as_at_once():
    stream = b": hello\r\nevent: x\r\nid: 3\r\ndata: one\r\ndata: two\r\n\r\nretry: 5\n\ndata:three\n\n"
    assert feed_in_pieces(stream, range(1, len(stream))) == SseParser().feed(stream) == [b"one\ntwo", b"three"]


def test_comments_keepalives_and_empty_lines_are_no_events():
    assert SseParser().feed(b": ping\n\n\n\n:\n\nevent: only\n\n") == []


def test_a_field_whose_name_begins_with_data_is_another_field():
    assert SseParser().feed(b"database: 1\n\ndata\n\n") == [b""]


def test_a_byte_order_mark_is_passed_over_once():
    assert SseParser().feed(b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbf\n\n") == [b"a", b"\xef\xbb\xbf"]


def test_several_events_of_one_read_come_in_order():
    assert SseParser().feed(b"data: 1\n\ndata: 2\n\ndata: 3\n\nda") == [b"1", b"2", b"3"]


def test_where_an_event_may_begin_is_told():
    parser = SseParser()
    assert not parser.is_between  # a byte order mark may come
    assert parser.feed(b"data: 1\n") == []
    assert not parser.is_between
    assert parser.feed(b"\n") == [b"1"]
    assert parser.is_between
    assert parser.feed(b"data: 2\r\r") == [b"2"]
    assert not parser.is_between  # a line feed may belong to that return


@pytest.mark.parametrize("piece", [1 << 10, 1 << 14, 1 << 16])
def test_a_large_event_in_pieces_is_put_together(piece):
    payload = b'{"t": "' + b"x" * (1 << 20) + b'"}'
    stream = b"data: " + payload + b"\n\n"
    assert feed_in_pieces(stream, range(piece, len(stream), piece)) == [payload]
