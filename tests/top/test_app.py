"""The dashboard driven by keys, its pictures at three sizes, and what happens when the source misbehaves."""

import asyncio
import os
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvctl.top.app import TopApp
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.frame import Overlay, ViewState
from kvctl.top.look import Look
from kvctl.top.scrape import Scrape
from kvctl.top.timing import INTERVALS_S
from tests.top.series import START_S

DATA = Path(__file__).parents[1] / "data" / "top"
URLS = {name: f"http://{name}:8000/metrics" for name in ("cache", "quiet", "seats")}
SETUPS = {
    "seats": (DemoServer(max_num_seqs=16, exports_limits=False), DemoLoad(users=40)),
    "cache": (DemoServer(kv_tokens=24_576), DemoLoad(users=70, prompt_tokens=700, output_tokens=500)),
    "quiet": (DemoServer(), DemoLoad(users=6, documents=3)),
}


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class TapeSource:
    """Delivers what it was given, at once, and stands still at its end."""

    title = "tape"

    def __init__(self, scrapes):
        self.scrapes = scrapes
        self.labels = {scrape.url: scrape.url.split("/")[2] for scrape in scrapes}
        self.interval_s = None
        self.paused = []
        self.is_stopped = False
        self.deliver = None

    def start(self, deliver):
        self.deliver = deliver
        thread = threading.Thread(target=lambda: [deliver(scrape) for scrape in self.scrapes])
        thread.start()
        thread.join()

    def stop(self):
        self.is_stopped = True

    def set_interval(self, interval_s):
        self.interval_s = interval_s

    def set_paused(self, paused):
        self.paused.append(paused)

    def now_s(self):
        return max(scrape.at_s for scrape in self.scrapes) + 0.2


@pytest.fixture(scope="module")
def tape():
    scrapes = []
    engines = {name: DemoEngine(server, DemoLoad(users=0)) for name, (server, _) in SETUPS.items()}
    for second in range(40):
        for name, engine in engines.items():
            if second == 15:
                engine.set_load(SETUPS[name][1])
            engine.advance(1.0)
            scrapes.append(Scrape(URLS[name], START_S + second, engine.page("demo-7b"), None))
    return scrapes


def make(scrapes, **changes):
    return TopApp(TapeSource(scrapes), Look(), ViewState(15.0, 1.0, "tape", **changes))


def only(tape, name):
    return [scrape for scrape in tape if scrape.url == URLS[name]]


async def settle(pilot, app, wanted):
    """Wait until the screen says so."""
    for _ in range(200):
        await pilot.pause(0.02)
        if wanted in app._frame.plain:
            return
    raise AssertionError(f"{wanted!r} never came:\n{app._frame.plain}")


def picture(svg):
    """The characters of an SVG with place and style: what a person sees, without ids, fonts and versions."""
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    css = "".join(style.text or "" for style in root.iter(f"{space}style"))
    styles = dict(re.findall(r"\.([\w-]+-r\d+) \{ ([^}]*) \}", css))
    seen = []
    for text in root.iter(f"{space}text"):
        style = styles.get(text.get("class", "").split()[0] if text.get("class") else "", "")
        content = (text.text or "").replace("\xa0", " ")
        if content.strip():
            seen.append((content.rstrip(), style.split(";")[0], "bold" in style))
    return seen


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
async def test_the_picture_is_the_committed_one(tape, width, height):
    app = make(tape)
    async with app.run_test(size=(width, height)) as pilot:
        await settle(pilot, app, "KV CACHE IS FULL")
        svg = app.export_screenshot(title="kvctl top")
    path = DATA / f"screen-{width}x{height}.svg"
    if os.environ.get("KVCTL_UPDATE_FRAMES"):
        path.write_text(re.sub(r"terminal-\d+", "terminal", svg))
    committed = picture(path.read_text())
    assert len(committed) > 50
    assert {bold for _, _, bold in committed} == {True, False}
    assert picture(svg) == committed


async def test_the_keys_do_what_the_help_says(tape):
    app = make(tape)
    async with app.run_test(size=(100, 30)) as pilot:
        await settle(pilot, app, "fleet 3 engines")
        await pilot.press("question_mark")
        assert "Reading the numbers" in app._frame.plain
        await pilot.press("escape", "e")
        assert "What it means" in app._frame.plain
        await pilot.press("down", "down")
        assert app.state.scroll == 2
        await pilot.press("e")
        assert app.state.overlay is Overlay.NONE
        await pilot.press("w")
        assert "window 60 s" in app._frame.plain
        await pilot.press("plus")
        assert app.source.interval_s == 2.0
        await pilot.press("minus", "minus", "minus", "minus", "minus")
        assert app.source.interval_s == INTERVALS_S[0]
        await pilot.press("down", "enter")
        assert "fleet" not in app._frame.plain
        assert "ALL SEATS ARE TAKEN" in app._frame.plain
        await pilot.press("2")
        assert "2 KV cache" in app._frame.plain
        assert "1 Requests" not in app._frame.plain
        await pilot.press("escape", "escape")
        assert "fleet 3 engines" in app._frame.plain
        await pilot.press("3")
        assert "HEALTHY" in app._frame.plain
        await pilot.press("s")
        assert "sort waiting" in app._frame.plain
        await pilot.press("slash", *"seats", "enter")
        assert "fleet 1 engines" in app._frame.plain
        await pilot.press("escape")
        assert "fleet 3 engines" in app._frame.plain
        await pilot.press("slash", *"ab", "backspace", "escape")
        assert app.state.pattern == ""
        await pilot.press("space")
        assert "PAUSED" in app._frame.plain
        await pilot.press("p")
        assert app.source.paused == [True, False]
        await pilot.press("r", "x", "f5", "0")
        await pilot.press("q")
    assert app.source.is_stopped
    assert app.return_code == 0


async def test_while_paused_nothing_moves(tape):
    app = make(only(tape, "quiet"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "HEALTHY")
        await pilot.press("space")
        before = app._frame.plain
        app.source.deliver(Scrape(URLS["quiet"], START_S + 40, "vllm:num_requests_running 77\n", None))
        await pilot.pause(0.2)
        assert app._frame.plain == before
        await pilot.press("space")
        assert "running 77" in app._frame.plain


async def test_with_one_engine_digits_make_a_panel_large(tape):
    app = make(only(tape, "cache"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "KV CACHE IS FULL")
        assert "fleet" not in app._frame.plain
        await pilot.press("4")
        assert "decode" in app._frame.plain
        assert "1 Requests" not in app._frame.plain
        await pilot.press("4")
        assert "1 Requests" in app._frame.plain


async def test_the_screen_follows_the_terminal(tape):
    app = make(tape)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "fleet")
        await pilot.resize_terminal(150, 50)
        await settle(pilot, app, "count")
        lines = app._frame.plain.split("\n")
        assert (len(lines), len(lines[0])) == (50, 150)
        await pilot.resize_terminal(20, 5)
        await settle(pilot, app, "needs")


async def test_a_server_that_fails_is_marked_and_one_that_returns_is_fresh(tape):
    mine = only(tape, "quiet")
    app = make(mine)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "HEALTHY")
        app.source.deliver(Scrape(URLS["quiet"], START_S + 40, None, "connection refused"))
        await settle(pilot, app, "connection refused")
        assert "STALE" in app._frame.plain
        app.source.deliver(Scrape(URLS["quiet"], START_S + 41, mine[-1].text, None))
        for _ in range(100):
            await pilot.pause(0.02)
            if "STALE" not in app._frame.plain:
                break
        assert "STALE" not in app._frame.plain


async def test_before_the_first_answer_the_screen_says_that_it_waits():
    class Silent(TapeSource):
        def start(self, deliver):
            self.deliver = deliver

        def now_s(self):
            return START_S

    app = TopApp(Silent([]), Look(), ViewState(15.0, 1.0, "live"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "waiting for the first answer")


async def test_only_changed_lines_are_drawn_again(tape):
    app = make(only(tape, "quiet"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot, app, "HEALTHY")
        drawn = []
        app._frame.refresh = lambda *regions, **_: drawn.append(len(regions))
        app.redraw()
        assert drawn == []
        app.state.is_paused = True
        app.redraw()
        assert drawn == [1]


async def test_a_hundred_endpoints_cost_one_frame_a_round(tape):
    text = tape[-1].text
    scrapes = [Scrape(f"http://s{i}:1/metrics", START_S + n, text, None) for n in range(2) for i in range(100)]
    app = make(scrapes)
    frames = []
    original = app.redraw
    app.redraw = lambda: (frames.append(1), original())
    async with app.run_test(size=(120, 40)) as pilot:
        await settle(pilot, app, "fleet 100 engines")
        await asyncio.sleep(0.3)
        assert len(frames) < 12
