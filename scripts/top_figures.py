"""Prints what `kvctl top` costs: time to answer, time to the first frame, CPU, memory. Needs no server.

    python scripts/top_figures.py            # a minute
    python scripts/top_figures.py --quick    # without the hour of replay

The pages come from the demo's engine over loopback. Times are medians; on a busy machine they tell of its load too,
so the CPU seconds stand beside them.
"""

import argparse
import fcntl
import os
import pty
import resource
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvctl.metrics.exposition import parse_page
from kvctl.top.demo import DemoEngine, DemoLoad, DemoServer
from kvctl.top.record import Recorder
from kvctl.top.scrape import Scrape

TOP = [sys.executable, "-m", "kvctl", "top"]
PAGE_SERIES = 1000


def padded(text: str, num_series: int) -> str:
    """The page with further series of the kind that servers add, up to that many."""
    have = sum(1 for line in text.splitlines() if line and line[0] != "#")
    more = (
        f'vllm:other_seconds_bucket{{engine="0",model_name="m",le="{n}",handler="h"}} {n}'
        for n in range(num_series - have)
    )
    return text + "\n".join(more) + "\n"


class Pages:
    """A page server whose engine works on in real time."""

    def __init__(self, num_series: int) -> None:
        engine = DemoEngine(DemoServer(max_num_seqs=16), DemoLoad(users=30))
        engine.advance(20.0)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine.advance(0.5)
                body = padded(engine.page(), num_series).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"127.0.0.1:{self.server.server_address[1]}"


class Screen:
    """The dashboard on a pseudo terminal of 120 x 40."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*TOP, *arguments], stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"}
        )
        os.close(slave)
        self.seen = b""

    def read(self, seconds: float, until: bytes | None = None) -> bool:
        """Take what it draws for so long, or until it has drawn that."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self.master], [], [], min(left, 0.05))[0]:
                try:
                    self.seen += os.read(self.master, 1 << 16)
                except OSError:
                    return False
            if until is not None and until in self.seen:
                return True
        return until is None

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory now, in MB of 2**20 bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / (1 << 20)

    def close(self) -> None:
        """Leave as a user does."""
        os.write(self.master, b"q")
        self.read(2.0)
        self.process.terminate()
        self.process.wait(10)
        os.close(self.master)


def report(what: str, value: str, target: str) -> None:
    """One line."""
    print(f"{what:<58} {value:<28} target {target}", flush=True)


def measure_once(address: str) -> None:
    walls, cpus = [], []
    for _ in range(7):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.monotonic()
        subprocess.run([*TOP, address, "--once", "--json"], stdout=subprocess.DEVNULL, check=False)
        walls.append(time.monotonic() - began - 1.0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    value = f"{wall:.2f} s (best {min(walls):.2f}, CPU {cpu:.2f})"
    report("--once against a local server, beyond its window of 1 s", value, "< 0.6 s")


def measure_first_frame(address: str) -> None:
    times, cpus = [], []
    for _ in range(7):
        screen = Screen(address)
        screen.read(20.0, b"Verdict")
        times.append(time.monotonic() - screen.began)
        cpus.append(screen.cpu_s())
        screen.close()
    value = f"{statistics.median(times):.2f} s (best {min(times):.2f}, CPU {statistics.median(cpus):.2f})"
    report("start to the first frame", value, "< 0.7 s")


def measure_cpu(address: str) -> None:
    screen = Screen(address)
    screen.read(20.0, b"Verdict")
    screen.read(5.0)
    before, began = screen.cpu_s(), time.monotonic()
    screen.read(20.0)
    share = (screen.cpu_s() - before) / (time.monotonic() - began)
    report(f"CPU at 1 s on a page of {PAGE_SERIES:,} series", f"{share:.1%} of a core", "< 3 %")
    report("resident memory then", f"{screen.rss_mb():.0f} MiB", "< 90")
    screen.close()


def measure_parser() -> None:
    engine = DemoEngine(DemoServer(), DemoLoad())
    engine.advance(5.0)
    pages = [engine.page(engine=str(n)) for n in range(400)]
    lines = [line for text in pages for line in text.splitlines() if not line.startswith("process_")][:60_000]
    text = "\n".join(lines)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        num_series = parse_page(text).num_series
        times.append(time.perf_counter() - began)
    scaled = min(times) * 50_000 / num_series
    report(f"a page of 50,000 series parsed (measured on {num_series:,})", f"{scaled:.2f} s", "< 1 s")


def measure_hour(folder: Path) -> None:
    path = folder / "hour.gz"
    recorder = Recorder(path)
    engine = DemoEngine(DemoServer(max_num_seqs=16), DemoLoad(users=20, think_s=1.0))
    for second in range(3600):
        engine.advance(0.2)
        recorder.add(Scrape("http://node:8000/metrics", 1e9 + second, engine.page(), None))
    recorder.close()
    screen = Screen("--replay", str(path), "--speed", "100")
    screen.read(20.0, b"Verdict")
    sizes = []
    for _ in range(4):
        screen.read(11.0)
        screen.seen = b""
        sizes.append(screen.rss_mb())
    report(
        "resident memory in an hour of replay, at each quarter", ", ".join(f"{s:.0f}" for s in sizes), "< 90 MiB, flat"
    )
    screen.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without the hour of replay")
    options = parser.parse_args()
    pages = Pages(PAGE_SERIES)
    measure_parser()
    measure_once(pages.address)
    measure_first_frame(pages.address)
    measure_cpu(pages.address)
    if not options.quick:
        with tempfile.TemporaryDirectory() as folder:
            measure_hour(Path(folder))


if __name__ == "__main__":
    main()
