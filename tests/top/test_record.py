"""Recording and replaying: what comes back is what went in, and damage is told as such."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest

from kvctl.errors import ConfigError
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.record import Recorder, read_record
from kvctl.top.replay_source import ReplaySource
from kvctl.top.scrape import Scrape

DATA = Path(__file__).parents[1] / "data" / "top"


def session(num=6, step_s=1.0):
    engine = DemoEngine(DemoServer(), DemoLoad())
    scrapes = []
    for index in range(num):
        engine.advance(1.0)
        scrapes.append(Scrape("http://a:1/metrics", 1000.0 + index * step_s, engine.page(), None))
        scrapes.append(Scrape("http://b:1/metrics", 1000.0 + index * step_s, None, "connection refused"))
    return scrapes


def write(path, scrapes):
    recorder = Recorder(path)
    for scrape in scrapes:
        recorder.add(scrape)
    recorder.close()


@pytest.mark.parametrize("name", ["session.jsonl", "session.gz"])
def test_a_session_comes_back_word_for_word(tmp_path, name):
    path = tmp_path / name
    scrapes = session()
    write(path, scrapes)
    assert list(read_record(path)) == scrapes


def test_odd_pages_survive(tmp_path):
    texts = ["", "a 1", 'a{x="é\u2028\\n"} 1\n\n', "a 1\nb 2", "a 2\nb 2", "one line more\na 2\nb 2\n"]
    scrapes = [Scrape("u", float(index), text, None) for index, text in enumerate(texts)]
    write(tmp_path / "odd", scrapes)
    assert list(read_record(tmp_path / "odd")) == scrapes


def test_pages_that_hardly_change_take_little_room(tmp_path):
    texts = [(DATA / f"vllm_under_load_{number}.txt").read_text() for number in (1, 2)]
    write(tmp_path / "one", [Scrape("u", 1.0, texts[0], None)])
    write(tmp_path / "two", [Scrape("u", 1.0, texts[0], None), Scrape("u", 2.0, texts[1], None)])
    second = (tmp_path / "two").stat().st_size - (tmp_path / "one").stat().st_size
    assert second < 0.25 * len(texts[1])


def test_every_scrape_is_on_disk_before_the_next(tmp_path):
    recorder = Recorder(tmp_path / "live")
    recorder.add(Scrape("u", 1.0, "a 1\n", None))
    assert [scrape.text for scrape in read_record(tmp_path / "live")] == ["a 1\n"]
    recorder.close()


@pytest.mark.parametrize("name", ["cut", "cut.gz"])
def test_a_file_cut_off_by_a_crash_is_read_up_to_there(tmp_path, name):
    path = tmp_path / name
    scrapes = session()
    write(path, scrapes)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    found = list(read_record(path))
    assert 0 < len(found) < len(scrapes)
    assert found == scrapes[: len(found)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"[1]\n",
        b'{"format":"other"}\n',
        b'{"format":"kvctl-top-record","version":99}\n',
        b'{"format":"kvctl-top-record","version":1}\n{"at":1}\n',
        b'{"format":"kvctl-top-record","version":1}\n{"at":1,"url":"u","changed":{"0":"x"}}\n',
        b'{"format":"kvctl-top-record","version":1}\n{"at":"x","url":"u","page":"a 1"}\n',
        b'{"format":"kvctl-top-record","version":1}\nnonsense\n{"at":1,"url":"u","page":""}\n',
        b"\xff\xfe\x00",
    ],
)
def test_what_is_no_recording_is_refused_with_the_line(tmp_path, content):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_record(path))
    assert str(path) in caught.value.message


def test_a_gz_name_with_other_content_is_refused(tmp_path):
    path = tmp_path / "bad.gz"
    path.write_bytes(b"not gzip at all")
    with pytest.raises(ConfigError):
        list(read_record(path))


def test_files_that_cannot_be_opened_are_told(tmp_path):
    with pytest.raises(ConfigError):
        list(read_record(tmp_path / "none"))
    with pytest.raises(ConfigError):
        Recorder(tmp_path / "no" / "folder")


def test_a_replay_delivers_everything_in_order_and_can_be_paused(tmp_path):
    path = tmp_path / "session"
    scrapes = session(8)
    write(path, scrapes)
    source = ReplaySource(path, 100.0)
    seen, done = [], threading.Event()

    def take(scrape):
        seen.append(scrape)
        if len(seen) == len(scrapes):
            done.set()

    source.start(take)
    assert done.wait(10)
    assert seen == scrapes
    assert source.now_s() == scrapes[-1].at_s
    source.stop()

    paused = ReplaySource(path, 1000.0)
    paused.set_paused(True)
    some = []
    paused.start(some.append)
    time.sleep(0.1)
    assert len(some) == 1  # the first one is read before the tape runs
    paused.stop()


def test_the_record_is_lines_of_json(tmp_path):
    path = tmp_path / "s.gz"
    write(path, session(2))
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert lines[0] == {"format": "kvctl-top-record", "version": 1}
    assert {"at", "url"} <= set(lines[1])
