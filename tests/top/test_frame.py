"""The screen as text: exact at every size, equal to the committed frames at three, and safe against any label."""

import os
import time
from pathlib import Path

import pytest

from kvctl.top.boxes import box
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.fleet_table import SortKey, arrange, table_lines
from kvctl.top.frame import MIN_HEIGHT, MIN_WIDTH, Overlay, ViewState, frame
from kvctl.top.gpu import GpuReading
from kvctl.top.graph import Glyphs, bar, draw
from kvctl.top.lines import explain_lines, line, wrapped
from kvctl.top.look import DARK, LIGHT, PLAIN, Look
from kvctl.top.monitor import FleetView, Monitor
from kvctl.top.scrape import Scrape
from kvctl.top.terminal import choose_look
from kvctl.top.verdict import Limit
from tests.top.series import START_S, gauges

DATA = Path(__file__).parents[1] / "data" / "top"
SIZES = [(80, 24), (120, 40), (200, 60)]
LOADS = {
    "seats": (DemoServer(max_num_seqs=16, exports_limits=False), DemoLoad(users=40)),
    "cache": (DemoServer(kv_tokens=24_576), DemoLoad(users=70, prompt_tokens=700, output_tokens=500)),
    "quiet": (DemoServer(), DemoLoad(users=6, documents=3)),
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def fleet() -> FleetView:
    urls = {f"http://{name}:8000/metrics": f"{name}:8000" for name in LOADS}
    monitor = Monitor(urls, 1.0)
    for url, (server, load) in zip(urls, LOADS.values(), strict=True):
        engine = DemoEngine(server, DemoLoad(users=0))
        for second in range(40):
            if second == 15:
                engine.set_load(load)
            engine.advance(1.0)
            monitor.add(Scrape(url, START_S + second, engine.page("demo-7b"), None))
    return monitor.view(START_S + 39.2, 15.0)


def state(**changes):
    return ViewState(15.0, 1.0, "test", **changes)


def single(fleet, name="cache"):
    views = tuple(view for view in fleet.engines if view.label.startswith(name))
    return FleetView(fleet.at_s, fleet.window_s, views)


def text_of(lines):
    return "\n".join(line.plain.rstrip() for line in lines) + "\n"


def check(name, text):
    """Compare with the committed frame; KVCTL_UPDATE_FRAMES=1 writes it anew, to be looked at before a commit."""
    path = DATA / name
    if os.environ.get("KVCTL_UPDATE_FRAMES"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_fleet_looks_as_committed(fleet, width, height):
    check(f"fleet-{width}x{height}.txt", text_of(frame(fleet, state(), width, height, Look())))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_one_engine_looks_as_committed(fleet, width, height):
    check(f"engine-{width}x{height}.txt", text_of(frame(single(fleet), state(), width, height, Look())))


def test_help_and_explanation_look_as_committed(fleet):
    shown = [
        frame(single(fleet), state(overlay=overlay), 80, 40, Look()) for overlay in (Overlay.HELP, Overlay.EXPLAIN)
    ]
    check("overlays-80x40.txt", text_of([*shown[0], *shown[1]]))


@pytest.mark.parametrize("look", [Look(), Look(PLAIN, Glyphs.ASCII), Look(LIGHT, Glyphs.BLOCK)])
@pytest.mark.parametrize("overlay", list(Overlay))
def test_every_frame_has_exactly_the_size_of_the_terminal(fleet, look, overlay):
    gpu = GpuReading(0, "NVIDIA H200", 70 << 30, 141 << 30, 0.93, 0.71, 612.0, 700.0)
    for width in (MIN_WIDTH, 53, 80, 97, 119, 120, 131, 149, 150, 300):
        for height in (MIN_HEIGHT, 17, 24, 31, 60):
            for shown in (fleet, single(fleet)):
                zoom = width % 5 if width % 5 < 4 else None
                lines = frame(shown, state(overlay=overlay, zoom=zoom, gpus=(gpu,)), width, height, look)
                assert len(lines) == height
                assert {one.cell_len for one in lines} == {width}
    assert len(frame(FleetView(0.0, 15.0, ()), state(overlay=overlay), 80, 24, look)) == 24


def test_a_terminal_too_small_says_so(fleet):
    lines = frame(fleet, state(), 30, 5, Look())
    assert len(lines) == 5
    assert "needs 40x12" in lines[0].plain or "kvctl top needs" in lines[0].plain


def test_the_verdict_is_the_first_thing_on_the_screen(fleet):
    lines = frame(single(fleet), state(), 80, 24, Look())
    assert "KV CACHE IS FULL" in lines[2].plain
    banner = [span.style for span in lines[2].spans if "on #" in str(span.style)]
    assert banner == [DARK.bad_banner]


def test_ascii_means_ascii(fleet):
    for overlay in Overlay:
        for width, height in SIZES:
            assert text_of(frame(fleet, state(overlay=overlay), width, height, Look(PLAIN, Glyphs.ASCII))).isascii()


def test_without_colour_no_style_has_one(fleet):
    for one in frame(fleet, state(), 120, 40, Look(PLAIN)):
        for span in one.spans:
            assert set(str(span.style).split()) <= {"bold", "reverse", "none"}


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\n\x9b31m\u202e\u200b" + "漢字🙂" * 40


def test_no_label_can_reach_the_terminal_or_break_the_frame():
    escaped = HOSTILE.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    labels = f'engine="{escaped}",model_name="{escaped}"'
    page = (
        f"vllm:num_requests_running{{{labels}}} 1e308\nvllm:num_requests_waiting{{{labels}}} -5\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 73.5\nvllm:generation_tokens_total{{{labels}}} NaN\n"
        f'kvctl:num_requests_waiting_by_reason{{{labels},reason="{escaped}"}} 1e300\n'
        f'kvctl:prefix_cache_miss_tokens_total{{{labels},reason="{escaped}"}} 1e300\n'
        f'vllm:cache_config_info{{{labels},cache_dtype="{escaped}",num_gpu_blocks="1e400",block_size="-3"}} 1\n'
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="{escaped}"}} 3\n'
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} -3\n'
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1e308\n"
        f"vllm:time_to_first_token_seconds_sum{{{labels}}} 1e308\n"
        f"kvctl:max_num_seqs{{{labels}}} 1e300\n"
    )
    monitor = Monitor({"u": "u"}, 1.0)
    for second in range(5):
        monitor.add(Scrape("u", START_S + second, page.replace(" NaN", f" {second}"), None))
    monitor.add(Scrape("u", START_S + 5, None, "ends with a bang"))
    shown = monitor.view(START_S + 6, 15.0)
    assert len(shown.engines) == 1
    for width, height in SIZES:
        for overlay in Overlay:
            lines = frame(shown, state(overlay=overlay), width, height, Look())
            assert {one.cell_len for one in lines} == {width}
            text = "".join(one.plain for one in lines)
            assert all(ch.isprintable() or ch == " " for ch in text), [ch for ch in text if not ch.isprintable()]
            assert "\u202e" not in text


def test_sorting_and_filtering_the_table(fleet):
    def names(sort, pattern=""):
        return [view.label.split(":")[0] for view in arrange(fleet.engines, sort, pattern)]

    assert names(SortKey.NAME) == ["cache", "quiet", "seats"]
    assert names(SortKey.VERDICT) == ["cache", "seats", "quiet"]
    assert names(SortKey.KV)[0] == "cache"
    assert names(SortKey.WAITING)[-1] == "quiet"
    assert names(SortKey.NAME, "SEATS:") == ["seats"]
    assert names(SortKey.NAME, "vllm") == ["seats"]
    assert names(SortKey.NAME, "max_num") == ["seats"]
    assert names(SortKey.NAME, "zzz") == []
    assert "no engine matches 'zzz'" in text_of(frame(fleet, state(pattern="zzz"), 80, 24, Look()))
    key, seen = SortKey.NAME, []
    for _ in SortKey:
        seen.append(key)
        key = key.next()
    assert key is SortKey.NAME
    assert set(seen) == set(SortKey)


def test_the_selected_row_stays_in_sight(fleet):
    rows = list(fleet.engines) * 10
    lines = table_lines(rows, 100, Look(), selected=25, max_rows=5)
    assert len(lines) == 6
    assert sum("▶" in one.plain for one in lines) == 1


def test_a_stale_engine_is_marked_in_table_and_verdict():
    monitor = Monitor({"http://a/metrics": "a", "http://b/metrics": "b"}, 1.0)
    for url in ("http://a/metrics", "http://b/metrics"):
        for second in range(2):
            monitor.add(Scrape(url, START_S + second, gauges(1, 0), None))
    monitor.add(Scrape("http://a/metrics", START_S + 2, None, "connection refused"))
    shown = monitor.view(START_S + 2, 15.0)
    text = text_of(frame(shown, state(), 100, 30, Look()))
    assert "stale: connection refused" in text
    assert "STALE 1 s" in text
    assert "1 stale" in text


@pytest.mark.parametrize("glyphs", list(Glyphs))
def test_graphs_fill_from_the_bottom_and_end_at_the_right(glyphs):
    lines = draw([0, None, 5, 10], 6, 2, glyphs=glyphs)
    assert [len(one) for one in lines] == [6, 6]
    assert lines[0].rstrip()[-1] != " "
    assert lines[0][0] == " "
    assert draw([1.0], 0, 3) == []
    assert draw([None, 0], 3, 1, glyphs=glyphs) == ["   "]
    assert draw([1e-9, 1.0], 2, 1, glyphs=Glyphs.BLOCK) == ["▁█"]


def test_a_braille_graph_has_the_dots_it_should():
    # two values a cell, four levels: 1 of 4 and 4 of 4
    assert draw([1, 4], 1, 1, top=4) == ["⣸"]
    assert draw([4, 8], 1, 2, top=8) == ["⢸", "⣿"]


def test_a_bar_shows_a_little_as_something_and_never_more_than_its_width():
    assert bar(0.001, 10) == ("█", "░" * 9)
    assert bar(7.0, 10) == ("█" * 10, "")
    assert bar(None, 4, glyphs=Glyphs.ASCII) == ("", "----")


def test_long_words_and_wide_characters_stay_inside():
    look = Look()
    assert line(("漢字" * 30, ""), width=11, look=look).cell_len <= 11
    assert all(one.cell_len <= 10 for one in wrapped("x" * 50 + " y " + "漢" * 30, "", 10))
    assert {one.cell_len for one in box(line(("漢" * 50, ""), width=90, look=look), [], 20, 4, look)} == {20}


def test_the_explanation_has_both_spellings_and_the_other_limits(fleet):
    view = single(fleet, "seats").engines[0]
    assert view.verdict.limit is Limit.MAX_NUM_SEQS
    text = text_of(explain_lines(view, 90, Look()))
    assert "kvctl        --max-num-seqs" in text
    assert "vLLM         --max-num-seqs" in text
    assert "What it means" in text


@pytest.mark.parametrize(
    ("options", "glyphs", "palette"),
    [
        ({}, Glyphs.BRAILLE, DARK),
        ({"blocks": True}, Glyphs.BLOCK, DARK),
        ({"ascii_only": True}, Glyphs.ASCII, DARK),
        ({"encoding": "ascii"}, Glyphs.ASCII, DARK),
        ({"encoding": None}, Glyphs.ASCII, DARK),
        ({"light": True}, Glyphs.BRAILLE, LIGHT),
        ({"plain": True, "light": True}, Glyphs.BRAILLE, PLAIN),
    ],
)
def test_the_look_follows_options_and_encoding(options, glyphs, palette):
    found = choose_look(**{"ascii_only": False, "blocks": False, "light": False, "plain": False, "encoding": "utf-8",
                           **options})  # fmt: skip
    assert (found.glyphs, found.palette) == (glyphs, palette)
