"""The framing of chunked bodies: the content comes out however it is cut, and what is no framing is told."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.bench.chunked_body import BadChunk, ChunkedBody

CONTENTS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def feed_in_pieces(body, stream, cuts):
    places = [0, *sorted(cuts), len(stream)]
    return b"".join(piece for start, end in pairwise(places) for piece in body.feed(stream[start:end]))


@given(CONTENTS, st.sampled_from([b"", b";name=value", b" ", b';q="a"']), st.lists(st.integers(0, 300), max_size=9))
def test_the_content_comes_out_however_the_body_is_cut(contents, extension, cuts):
    stream = b"".join(b"%x%b\r\n%b\r\n" % (len(content), extension, content) for content in contents)
    stream += b"0\r\ntrailer: x\r\n\r\n"
    body = ChunkedBody()
    assert feed_in_pieces(body, stream, [cut for cut in cuts if cut < len(stream)]) == b"".join(contents)
    assert body.is_complete


def test_where_a_chunk_may_begin_is_told():
    body = ChunkedBody()
    assert body.is_between
    for data, is_between in ((b"3", False), (b"\r\nabc", False), (b"\r\n", True), (b"2\r\nab\r\n", True)):
        body.feed(data)
        assert body.is_between is is_between
    body.feed(b"0\r\n")
    assert not body.is_between
    assert not body.is_complete
    assert body.feed(b"\r\nwhat follows belongs to nobody") == []
    assert body.is_complete


@pytest.mark.parametrize(
    "stream", [b"x\r\n", b"\r\n", b"-1\r\n", b"1_0\r\n", b"3\r\nabcd\r\n", b"f" * 17_000, b"f" * 16]
)
def test_what_is_no_framing_is_told(stream):
    with pytest.raises(BadChunk):
        ChunkedBody().feed(stream + (b"" if len(stream) > 100 else b"\r\n"))
