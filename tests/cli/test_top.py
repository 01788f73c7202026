"""`kvctl top` as a user runs it: exit codes, output, options that contradict, and a terminal left as it was."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvctl.cli.app import build_app
from kvctl.errors import ConfigError
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.record import Recorder
from kvctl.top.scrape import Scrape
from tests.top.page_server import PageServer, page

ROOT = Path(__file__).parents[2]
SEATS = DemoServer(max_num_seqs=8)


def run(*arguments, env=None):
    """The command in this process: exit code, stdout."""
    argv = ["top", *arguments]
    result = CliRunner().invoke(build_app(argv), argv, env={"COLUMNS": "80", "NO_COLOR": "1", **(env or {})})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


class Playing:
    """A server whose page moves on by a second at every scrape."""

    def __init__(self, load, server=SEATS, warm_up=8):
        self.engine = DemoEngine(server, load)
        self.engine.advance(warm_up)

    def __call__(self):
        self.engine.advance(1.0)
        return self.engine.page("demo-7b")


def served(load, server=SEATS):
    return PageServer({"/metrics": page(Playing(load, server))})


def once(url, *more):
    return run(url, "--once", "--interval", "0.2", *more)


@pytest.mark.parametrize(
    ("load", "code", "says"),
    [
        (DemoLoad(users=0), 0, "IDLE"),
        (DemoLoad(users=4, documents=2), 0, "HEALTHY"),
        (DemoLoad(users=30), 10, "ALL SEATS ARE TAKEN"),
    ],
    ids=["idle", "healthy", "limit"],
)
def test_once_prints_a_page_and_its_exit_code_is_the_verdict(load, code, says):
    with served(load) as server:
        found, output = once(server.url)
    assert found == code
    assert says in output
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 80


def test_nobody_there_is_exit_code_1_and_said():
    with served(DemoLoad()) as server:
        url = server.url
    code, output = once(url)
    assert code == 1
    assert "connection refused" in output


def test_a_page_of_something_else_is_exit_code_3():
    with PageServer({"/metrics": page("node_load1 1\n")}) as server:
        code, output = once(server.url)
    assert code == 3
    assert "no names of an inference server" in output


def test_json_has_every_field_and_numbers_or_null():
    with served(DemoLoad(users=30)) as server:
        code, output = once(server.url, "--json")
        address = server.url
    assert code == 10
    found = json.loads(output)
    assert found["schema_version"] == 1
    assert found["window_s"] == pytest.approx(0.2, abs=0.15)
    assert abs(found["at"] - time.time()) < 60
    (engine,) = found["engines"]
    wanted = (
        "url engine model server running waiting kv_usage kv_tokens prefix_hit_rate preemptions_per_s "
        "prompt_tokens_per_s generation_tokens_per_s ttft_s itl_s tpot_s e2e_s queue_s prefill_s decode_s"
    )
    assert set(wanted.split()) <= set(engine)
    assert engine["url"] == f"{address}/metrics"
    assert (engine["server"], engine["model"], engine["engine"]) == ("kvctl", "demo-7b", "0")
    assert (engine["running"], engine["kv_tokens"]) == (8, 57_344)
    assert {"mean", "p50", "p99"} <= set(engine["itl_s"])
    low, high = engine["itl_s"]["p50"]
    assert low < engine["itl_s"]["mean"] < high
    assert engine["speculative_acceptance"] is None
    verdict = found["verdict"]
    assert verdict["limit"] == "max_num_seqs"
    assert 0 < verdict["confidence"] <= 1
    assert verdict["advice"][0]["vllm"].startswith("--max-num-seqs ")
    assert {"evidence", "explain"} <= set(verdict)


def test_json_of_a_dead_server_is_whole_too():
    with served(DemoLoad()) as server:
        url = server.url
    code, output = once(url, "--json")
    assert code == 1
    found = json.loads(output)
    assert found["engines"][0]["error"] == "connection refused"
    assert found["verdict"]["limit"] == "unknown"


def test_several_servers_are_one_table_and_the_worst_decides():
    with served(DemoLoad(users=0)) as calm, served(DemoLoad(users=30)) as busy:
        code, output = run(calm.url, busy.url, "--once", "--interval", "0.2")
    assert code == 10
    assert "fleet 2 engines  1 limited" in output
    assert "max_num_seqs" in output
    assert "idle" in output


def test_the_demo_needs_no_server():
    code, output = run("--demo", "--once")
    assert code == 10
    assert "fleet 3 engines" in output


def test_ascii_and_narrow_terminals():
    code, output = run("--demo", "--once", "--ascii", env={"COLUMNS": "60"})
    assert code == 10
    assert output.isascii()
    assert max(map(len, output.splitlines())) <= 60


def test_colour_goes_away_with_no_color_and_is_there_without(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-m", "kvctl", "top", "--demo", "--once"]

    def out(**more):
        env = {**environment, **more}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, check=False).stdout

    assert "\x1b[" in out(FORCE_COLOR="1")
    plain = out(FORCE_COLOR="1", NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38;)", plain)


def test_record_then_replay_says_the_same(tmp_path):
    path = tmp_path / "session.gz"
    with served(DemoLoad(users=30)) as server:
        code, first = once(server.url, "--record", str(path))
    assert code == 10
    code, again = run("--replay", str(path), "--once")
    assert code == 10
    assert "ALL SEATS ARE TAKEN" in again
    assert "Short of seats" in first


def test_headers_and_the_key_come_from_options_and_environment():
    with served(DemoLoad()) as server:
        code, _ = run(server.url, "--once", "--interval", "0.2", "--header", "X-Team: search", "--api-key",
                      env={"KVCTL_API_KEY": "secret"})  # fmt: skip
        assert code == 0
        headers = server.asked[0][2]
    assert headers["X-Team"] == "search"
    assert headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["localhost:1", "--demo"],
        ["--demo", "--replay", "x"],
        ["--demo", "--record", "x"],
        ["--once", "--interval", "0"],
        ["--once", "--interval", "soon"],
        ["--once", "--interval", "2h"],
        ["--window", "7s"],
        ["--timeout", "0"],
        ["--speed", "0", "--demo"],
        ["--speed", "nan", "--demo"],
        ["--once", "--header", "no colon"],
        ["--once", "--header", "X: a\x07b"],
        ["--once", "--header", "X Y: z"],
        ["--api-key", "--once"],
        ["ftp://host", "--once"],
        ["--replay", "/no/such/file", "--once"],
        ["--record", "/no/such/folder/file", "--once"],
        ["--record", "/tmp", "--once"],
        [],  # no terminal here
    ],
)
def test_what_makes_no_sense_is_refused_with_a_hint(arguments, monkeypatch):
    for name in ("KVCTL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as caught:
        run(*arguments)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


def test_an_empty_recording_is_told_as_such(tmp_path):
    path = tmp_path / "empty"
    Recorder(path).close()
    with pytest.raises(ConfigError, match="holds no scrape"):
        run("--replay", str(path), "--once")


class Terminal:
    """`kvctl top` on a pseudo terminal of 80 x 24."""

    def __init__(self, *arguments, env=None):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvctl", "top", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color", **(env or {})},
            cwd=ROOT,
            start_new_session=True,
        )
        self.seen = b""

    def read_until(self, wanted, timeout_s=30.0):
        deadline = time.monotonic() + timeout_s
        while wanted not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} never came: {self.seen[-600:]!r}"
            if select.select([self.master], [], [], min(left, 0.2))[0]:
                self.seen += os.read(self.master, 65536)
        return self.seen

    def press(self, keys):
        os.write(self.master, keys)

    def finish(self, timeout_s=20.0):
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 65536)
        after = termios.tcgetattr(self.slave)
        os.close(self.master)
        os.close(self.slave)
        return self.process.wait(5), after


def leaves_the_terminal_as_it_was(terminal, after):
    return after == terminal.before and b"\x1b[?1049l" in terminal.seen and b"\x1b[?25h" in terminal.seen


@pytest.mark.parametrize(("way", "wanted"), [("q", 0), ("ctrl-c", 130), ("sigterm", 0), ("sigint", 130)])
def test_the_terminal_is_given_back_whatever_ends_it(way, wanted):
    terminal = Terminal("--demo")
    terminal.read_until(b"limit")
    if way == "q":
        terminal.press(b"q")
    elif way == "ctrl-c":
        terminal.press(b"\x03")
    else:
        terminal.process.send_signal(signal.SIGTERM if way == "sigterm" else signal.SIGINT)
    code, after = terminal.finish()
    assert code == wanted
    assert leaves_the_terminal_as_it_was(terminal, after)


def test_a_crash_gives_the_terminal_back_too(tmp_path):
    broken = "import kvctl.top.app as a\ndef boom(*_): raise RuntimeError('a bug of ours')\na.TopApp._act = boom\n"
    (tmp_path / "sitecustomize.py").write_text(broken)
    terminal = Terminal("--demo", env={"PYTHONPATH": str(tmp_path)})
    terminal.read_until(b"limit")
    terminal.press(b"x")
    code, after = terminal.finish()
    assert code == 1
    assert b"a bug of ours" in terminal.seen
    assert leaves_the_terminal_as_it_was(terminal, after)


def test_a_recording_plays_on_the_screen_and_no_color_has_none(tmp_path):
    path = tmp_path / "session"
    recorder = Recorder(path)
    playing = Playing(DemoLoad(users=30))
    for second in range(6):
        recorder.add(Scrape("http://node:1/metrics", 1000.0 + second, playing(), None))
    recorder.close()
    terminal = Terminal("--replay", str(path), "--speed", "50", env={"NO_COLOR": "1"})
    terminal.read_until(b"ALL SEATS ARE TAKEN")
    terminal.press(b"q")
    code, _ = terminal.finish()
    assert code == 0
    colours = re.findall(rb"\x1b\[[0-9;]*(?:38|48);2;(\d+);(\d+);(\d+)", terminal.seen)
    assert all(len(set(rgb)) == 1 for rgb in colours)  # only greys, if any


def test_top_imports_no_torch_and_no_web_stack():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom kvctl.cli.app import build_app\n"
        "argv = ['top', '--demo', '--once']\nCliRunner().invoke(build_app(argv), argv)\n"
        "print([m for m in ('torch', 'numpy', 'transformers', 'fastapi', 'httpx', 'textual', 'prometheus_client') "
        "if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"
