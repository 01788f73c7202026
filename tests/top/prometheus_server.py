"""A real Prometheus on loopback, from the PATH or from Debian's package unpacked into a cache. For tests only."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

CONFIG = """
global: {{scrape_interval: {interval}, scrape_timeout: {interval}}}
scrape_configs:
- job_name: kvctl
  static_configs: [{{targets: ['{target}']}}]
"""


def find_prometheus() -> Path | None:
    """The program; None where it is neither installed nor to be had from the package index."""
    installed = shutil.which("prometheus")
    if installed:
        return Path(installed)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvctl-tests" / "prometheus"
    program = cache / "usr" / "bin" / "prometheus"
    if program.exists():
        return program
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        return None
    cache.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", "-qq", "prometheus"], cwd=cache, check=True, capture_output=True, timeout=90
        )
        (package,) = cache.glob("prometheus_*.deb")
        unpacked = cache / f"unpacking-{os.getpid()}"
        subprocess.run(["dpkg", "-x", package, unpacked], check=True, capture_output=True, timeout=60)
        shutil.move(unpacked / "usr", cache / "usr")
        shutil.rmtree(unpacked)
        package.unlink()
    except (subprocess.SubprocessError, OSError, ValueError):
        return None
    return program if program.exists() else None


class Prometheus:
    """Scrapes one target into a folder until closed."""

    def __init__(self, program: Path, folder: Path, target: str, interval: str) -> None:
        (folder / "prometheus.yml").write_text(CONFIG.format(interval=interval, target=target))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--storage.tsdb.retention.time=1h",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait(self, timeout_s: float = 20.0) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=2):
                    return
            except OSError:
                time.sleep(0.1)
        raise AssertionError("Prometheus did not start")

    def query(self, expression: str, at_s: float | None = None) -> list[dict]:
        """The result of an instant query."""
        parameters = {"query": expression} | ({} if at_s is None else {"time": f"{at_s:.3f}"})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]["result"]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(10)
        self._log.close()
