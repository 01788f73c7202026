"""Plots: well-formed, at the right places, with round ticks."""

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.bench.svg_plot import Axis, LimitLine, Series, line_plot, tick_label

NUMBERS = st.floats(-1e7, 1e7, allow_nan=False)


@given(
    st.lists(st.tuples(NUMBERS, st.one_of(st.none(), NUMBERS)), max_size=12),
    st.booleans(),
    st.booleans(),
    st.text(max_size=8),
)
def test_any_points_give_well_formed_svg_inside_its_frame(points, x_log, y_log, name):
    name = "".join(c for c in name if c.isprintable())
    series = [Series(name, sorted(points, key=lambda p: p[0])), Series("b", [(1.0, 2.0)], 2, marks_points=True)]
    text = line_plot("t <&>", series, Axis("x", x_log), Axis("y", y_log), limits=[LimitLine(3.0, "SLO")])
    root = ElementTree.fromstring(text)
    for line in root.iter("polyline"):
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 63 <= x <= 641
            assert 33 <= y <= 301


def test_points_stand_where_the_axis_says():
    root = ElementTree.fromstring(line_plot("t", [Series("a", [(0, 0), (10, 100)])], Axis("x"), Axis("y")))
    first, last = root.find("polyline").attrib["points"].split()
    assert first == "64.0,256.0"
    assert last == "624.0,34.0"


def test_a_gap_in_the_data_breaks_the_line():
    points = [(0, 1), (1, 2), (2, None), (3, 4), (4, 5)]
    assert line_plot("t", [Series("a", points)], Axis("x"), Axis("y")).count("<polyline") == 2


def test_a_series_without_a_point_is_not_in_the_legend():
    drawn = [Series("drawn", [(1, 2), (2, 3)]), Series("other", [(1, 3), (2, 4)], 2), Series("empty", [(1, None)], 3)]
    text = line_plot("t", drawn, Axis("x"), Axis("y"))
    assert ">other<" in text
    assert ">empty<" not in text


def test_nothing_to_draw_is_said():
    assert "no data" in line_plot("t", [Series("a", [])], Axis("x"), Axis("y"))
    assert "no data" in line_plot("t", [Series("a", [(1, None)])], Axis("x"), Axis("y"))


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (250, "250"), (20_000, "20k"), (3e6, "3M"), (2e9, "2G")]
)
def test_ticks_are_short(value, text):
    assert tick_label(value) == text
