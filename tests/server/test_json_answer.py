import json

from hypothesis import given
from hypothesis import strategies as st

from kvctl.server.json_answer import INLINE_VALUES, dump_in_pieces, dump_json, json_answer

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)


@given(values)
def test_pieces_make_the_same_text(value):
    assert dump_in_pieces(value) == dump_json(value)


def test_long_lists_of_plain_values_are_cut_and_put_together_again():
    for length in (0, 1, 63, 64, 65, 128, 1000):
        value = {"tokens": list(range(length)), "mixed": [None] * length + [{"a": [1]}]}
        assert json.loads(dump_in_pieces(value)) == value


async def test_short_and_long_answers_are_the_same():
    value = {"choices": [{"top": {"a": -1.5}}, None]}
    answers = [await json_answer(lambda: value, count) for count in (1, INLINE_VALUES + 1)]
    assert {bytes(answer.body) for answer in answers} == {json.dumps(value, separators=(",", ":")).encode()}
    assert answers[0].media_type == "application/json"
