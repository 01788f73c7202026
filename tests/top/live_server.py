"""A real `kvctl serve` with a small random model, and clients that drive it into a limit. For tests only."""

import http.client
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> Path:
    """A model folder without weights (the server makes random ones) and with a byte tokenizer."""
    from tests.support import byte_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(byte_tokenizer.CONFIG))
    byte_tokenizer.build_backend().save(str(folder / "tokenizer.json"))
    return folder


class LiveServer:
    """The process, once it has said its address."""

    def __init__(self, folder: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "kvctl", "serve", str(folder), "--load-format", "dummy", "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, "--threads", "1", "--disable-uvicorn-access-log", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        self._said: list[str] = []
        self._address: queue.Queue[int | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0

    def wait(self, timeout_s: float = 60.0) -> int:
        """The port, once the server is ready."""
        port = self._address.get(timeout=timeout_s)
        if port is None:
            raise AssertionError("the server did not start:\n" + "".join(self._said))
        self.port = port
        return port

    def stop(self) -> None:
        """End the process and its engine."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._reader.join(5)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._said.append(line)
            ready = re.search(r"Ready in .*http://[\d.]+:(\d+)", line)
            if ready:
                self._address.put(int(ready[1]))
        self._address.put(None)


class Load:
    """So many clients that each send one request after the other until stopped."""

    def __init__(self, port: int, clients: int, prompts: Callable[[int], Iterator[list[int]]], max_tokens: int) -> None:
        self._port = port
        self._max_tokens = max_tokens
        self._stopped = threading.Event()
        self.errors: list[str] = []
        self.num_done = 0
        self._threads = [
            threading.Thread(target=self._send, args=(prompts(number),), daemon=True) for number in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(30)

    def _send(self, prompts: Iterator[list[int]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            for prompt in prompts:
                if self._stopped.is_set():
                    return
                body = {"prompt": prompt, "max_tokens": self._max_tokens, "ignore_eos": True, "temperature": 0}
                connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200:
                    self.errors.append(text.decode()[:300])
                    return
                self.num_done += 1
        except OSError as error:
            self.errors.append(repr(error))
        finally:
            connection.close()
