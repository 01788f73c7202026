"""scripts/quickstart's second half, for real: the demo model, a server process, a streamed answer."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "quickstart.py"


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-u", str(SCRIPT), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def port_in(output: str) -> int:
    found = re.search(r"http://127\.0\.0\.1:(\d+)", output)
    assert found is not None, output
    return int(found[1])


@pytest.mark.usefixtures("demo_folder")
def test_once_prints_a_streamed_answer_with_its_speed_and_stops_the_server() -> None:
    with socket.socket() as taken:  # the wished port is not free
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        wished = taken.getsockname()[1]
        process = start("--once", "--port", str(wished))
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert f"Port {wished} is taken." in output
    assert "a good night's sleep" in output  # the question
    assert "bedtime" in output.split("sleep.", 1)[1]  # and an answer to it
    assert re.search(r"first token after \d+ ms, then \d+\.\d tokens/s \(\d+ tokens\)", output), output
    assert port_in(output) != wished
    assert not is_open(port_in(output))


@pytest.mark.usefixtures("demo_folder")
def test_ctrl_c_stops_script_and_server() -> None:
    process = start("--port", "0")
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Still serving"):
            break
    port = port_in("".join(lines))
    assert is_open(port), "".join(lines)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to everybody in the foreground
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 130, rest
    assert "Stopped." in rest
    assert "Traceback" not in rest
    assert not is_open(port)


@pytest.mark.usefixtures("demo_folder")
def test_a_server_that_does_not_start_shows_the_end_of_its_log() -> None:
    process = start("--once", "--port", "0", "--", "--max-model-len", "99999999")
    output, _ = process.communicate(timeout=300)
    assert process.returncode not in (0, None)
    assert "quickstart: the server ended with exit code" in output
    assert "max-model-len" in output or "99,999,999" in output or "99999999" in output
