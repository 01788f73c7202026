"""A `kvctl serve` in a process of its own for the scripts that load, measure or break one.

Knows how to start it, read its /metrics and look at its processes from outside; no requests. Not a command.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

import httpx

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 20
_READY = re.compile(r"Ready in .*?: (\S+) \(model ([^,]+),")
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")

Page = dict[tuple[str, str], float]


class ServerUnderTest:
    """Starts on entering, is gone on leaving. `url` is where it answers, `model` its name there."""

    def __init__(self, *arguments: str) -> None:
        self.command = [sys.executable, "-m", "kvctl", "serve", *arguments, "--port", "0"]
        self.url = self.model = ""

    def __enter__(self) -> "ServerUnderTest":
        descriptor, name = tempfile.mkstemp(prefix="kvctl-serve-", suffix=".log")
        self._log = Path(name)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with os.fdopen(descriptor, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (ready := _READY.search(self.log())):
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                said = self.log()
                self.__exit__(None, None, None)
                sys.exit(f"kvctl serve did not start:\n{said}")
            time.sleep(0.05)
        self.url, self.model = ready[1], ready[2]
        self.engine_pid = self._engine_pid()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self._log.unlink(missing_ok=True)

    def stop(self) -> int:
        """SIGTERM, then the exit code; killed if it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def log(self) -> str:
        """Everything it has said so far."""
        return self._log.read_text(errors="replace")

    def page(self) -> Page:
        """/metrics now: (name, labels as text) -> value. Names end as on the page, with _total and _count."""
        return read_page(httpx.get(f"{self.url}/metrics", timeout=60, trust_env=False).text)

    def resources(self) -> dict[str, int]:
        """Memory, open files and threads of the API process and the engine process, from /proc."""
        found = {}
        for name, pid in (("api", self.process.pid), ("engine", self.engine_pid)):
            status = Path(f"/proc/{pid}/status").read_text()
            found[f"{name} rss_bytes"] = _field(status, "VmRSS") * 1024
            found[f"{name} threads"] = _field(status, "Threads")
            found[f"{name} fds"] = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208  # names are enough
        return found

    def cpu_s(self, pid: int) -> float:
        """CPU seconds of a process so far."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _engine_pid(self) -> int:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        children = {int(pid) for task in tasks for pid in task.read_text().split()}
        if len(children) != 1:
            sys.exit(f"the server has {len(children)} child processes, expected its engine alone")
        return children.pop()


def read_page(text: str) -> Page:
    """The samples of a page of Prometheus text."""
    samples = (_SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return {(sample[1], sample[2] or ""): float(sample[3]) for sample in samples if sample}


def total(page: Page, name: str, **labels: str) -> float:
    """Sum of a family's samples that carry these labels.

    Raises:
        KeyError: there is none.
    """
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    values = [value for (found, text), value in page.items() if found == name and all(w in text for w in wanted)]
    if not values:
        raise KeyError(f"{name} {labels}")
    return sum(values)


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0
