"""A real `kvctl serve` in a process of its own, over a tiny model with random weights."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from tests.support.byte_tokenizer import EOS_ID, VOCAB_SIZE, save_tokenizer

START_TIMEOUT_S = 60
_READY = re.compile(r"Ready in .*?: (\S+) \(model")


def save_tiny_model(folder: Path, *, max_model_len: int = 512) -> Path:
    """A Llama of three narrow layers: config and tokenizer; its weights are drawn at load (--load-format dummy)."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": EOS_ID,
        "bos_token_id": 256,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)
    return folder


class ServeProcess:
    """Starts on entering, is gone on leaving. `url` is where it answers, `log()` what it said."""

    def __init__(self, model: Path | str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.command = [sys.executable, "-m", "kvctl", "serve", str(model), "--port", "0", *arguments]
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}

    @classmethod
    def tiny(cls, folder: Path, *arguments: str) -> "ServeProcess":
        """Over a tiny model folder, float32, one thread."""
        options = ("--load-format", "dummy", "--dtype", "float32", "--threads", "1", "--served-model-name", "tiny")
        return cls(folder, *options, *arguments)

    def __enter__(self) -> "ServeProcess":
        self._log_file = Path(os.environ.get("TMPDIR", "/tmp")) / f"kvctl-serve-{os.getpid()}-{time.monotonic_ns()}.log"
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(self.command, stderr=log, stdout=log, env=self.environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (ready := _READY.search(self.log())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__(None, None, None)
                raise AssertionError(f"kvctl serve did not start:\n{self.final_log}")
            time.sleep(0.02)
        self.url = ready[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.final_log = self.log()
        self._log_file.unlink()

    def log(self) -> str:
        """Everything it has said so far."""
        return self._log_file.read_text(errors="replace")

    def wait(self, timeout_s: float = 15) -> int:
        """Wait for its end; return the exit code."""
        return self.process.wait(timeout_s)

    def engine_pid(self) -> int:
        """Process id of its engine process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        if not children:  # started from another thread
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            children = [pid for task in tasks for pid in task.read_text().split()]
        [pid] = children
        return int(pid)

    def metric(self, name: str, **labels: str) -> float:
        """Value of a series of /metrics, summed where the labels fit several."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        total, found = 0.0, False
        for line in page.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}(?:\{{(.*)\}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total, found = total + float(match[2]), True
        assert found, f"no {name} with {labels}"
        return total

    def wait_for(self, name: str, value: float, timeout_s: float = 15) -> None:
        """Wait until a series has at least this value."""
        deadline = time.monotonic() + timeout_s
        while self.metric(name) < value:
            assert time.monotonic() < deadline, f"{name} stays under {value}"
            time.sleep(0.01)

    def wait_idle(self, timeout_s: float = 5) -> None:
        """Wait until no request runs or waits and no block is held."""
        deadline = time.monotonic() + timeout_s
        while True:
            busy = [
                self.metric("vllm:num_requests_running"),
                self.metric("vllm:num_requests_waiting"),
                self.metric("vllm:kv_cache_usage_perc"),
            ]
            if not any(busy):
                return
            assert time.monotonic() < deadline, f"still busy: running, waiting, usage = {busy}"
            time.sleep(0.02)
