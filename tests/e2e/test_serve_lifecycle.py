"""How a server starts, ends and dies, seen from outside."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.support.serve_process import ServeProcess, save_tiny_model

LONG = {"prompt": "long", "max_tokens": 16_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With room for requests that take many seconds."""
    return save_tiny_model(tmp_path_factory.mktemp("long"), max_model_len=16_384)


class Stream(threading.Thread):
    """Reads a streamed completion in the background."""

    def __init__(self, url, **changes):
        super().__init__()
        self.url, self.body = url, {**LONG, **changes}
        self.events = []
        self.has_started = threading.Event()
        self.start()
        assert self.has_started.wait(15)

    def run(self):
        with (
            contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError),  # the server may end at once
            httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
                    self.has_started.set()

    def result(self):
        self.join(30)
        assert self.events and self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


def wait_for_health(server, status):
    for _ in range(600):
        health = httpx.get(f"{server.url}/health")
        if health.status_code == status:
            return health.json()
        time.sleep(0.05)
    raise AssertionError(f"/health is not {status} but {health.text}")


def test_killing_the_engine_ends_streams_with_an_error_and_the_server_with_exit_1(tiny_model):
    with ServeProcess.tiny(tiny_model) as server:
        stream = Stream(server.url, n=4)
        os.kill(server.engine_pid(), signal.SIGKILL)
        events = stream.result()
        assert events[-1]["error"]["type"] == "ServiceUnavailableError" and "engine" in events[-1]["error"]["message"]
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert server.wait() == 1
    assert "engine" in server.final_log and "Traceback" not in server.final_log


def test_health_notices_an_engine_that_is_stopped_and_one_that_gets_on_again(tiny_model):
    with ServeProcess.tiny(tiny_model, "--engine-stall-timeout", "1") as server:
        stream = Stream(server.url, n=2, max_tokens=2000)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        health = wait_for_health(server, 503)
        assert health["status"] == "stalled" and "has not finished a step for" in health["reason"]
        assert httpx.get(f"{server.url}/ping").status_code == 503
        os.kill(engine, signal.SIGCONT)
        assert wait_for_health(server, 200)["reason"] is None
        events = stream.result()
        assert [e["choices"][0]["finish_reason"] for e in events].count("length") == 2, "nothing was killed"
    assert "--engine-stall-timeout" in server.final_log


def test_sigterm_lets_running_requests_end_and_exits_0(tiny_model):
    with ServeProcess.tiny(tiny_model, "--shutdown-timeout", "30") as server:
        stream = Stream(server.url, n=2, max_tokens=700)
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{server.url}/health").status_code == 200:
            time.sleep(0.01)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        events = stream.result()
        assert [e["choices"][0]["finish_reason"] for e in events].count("length") == 2
        assert server.wait() == 0
    assert "Shutting down" in server.final_log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_timeout_running_requests_are_told_and_aborted(tiny_model, number):
    with ServeProcess.tiny(tiny_model) as server:
        stream = Stream(server.url, n=8)
        engine = server.engine_pid()
        server.process.send_signal(number)
        assert "shutting down" in stream.result()[-1]["error"]["message"]
        assert server.wait() == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


def test_a_client_that_has_sent_half_a_request_does_not_keep_the_server_from_ending(tiny_model):
    with ServeProcess.tiny(tiny_model) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b'Content-Length: 99\r\n\r\n{"prompt'
            )
            assert httpx.get(f"{server.url}/health").status_code == 200  # so that the half is read
            server.process.send_signal(signal.SIGTERM)
            assert b" 503 " in client.recv(1000)
        assert server.wait() == 0
    assert "ERROR" not in server.final_log  # uvicorn complains of requests that it must cancel


def test_a_second_ctrl_c_ends_at_once(tiny_model):
    with ServeProcess.tiny(tiny_model, "--shutdown-timeout", "60") as server:
        stream = Stream(server.url, n=4)
        server.process.send_signal(signal.SIGINT)
        while httpx.get(f"{server.url}/health").status_code == 200:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        assert server.wait(5) == 130
        stream.join(10)


def test_the_queue_limit_the_key_and_the_socket_work_together(tiny_model, tmp_path):
    path = tmp_path / "kvctl.sock"
    options = ("--uds", str(path), "--api-key", "secret", "--max-num-queued-reqs", "1")
    with ServeProcess.tiny(tiny_model, *options) as server:
        assert server.url == f"unix:{path}"
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://x", timeout=30) as client:
            assert client.get("/v1/models").status_code == 401
            client.headers["Authorization"] = "Bearer secret"
            with client.stream("POST", "/v1/completions", json=LONG) as running:
                lines = running.iter_lines()  # kept: httpx closes the response when the iterator goes
                next(lines)
                full = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
                assert full.status_code == 503 and full.headers["retry-after"]
            metrics = client.get("/metrics").text
            assert 'vllm:admission_rejections_total{engine="0",model_name="tiny",reason="max_num_queued_reqs"} 1' in (
                metrics.replace('model_name="tiny",engine="0"', 'engine="0",model_name="tiny"')
            )
            for _ in range(100):
                if client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200:
                    break
                time.sleep(0.02)
            else:
                pytest.fail("the place of the request that left was not freed")


def test_lower_priority_values_run_first(tiny_model):
    small = ("--max-num-seqs", "1", "--num-gpu-blocks-override", "513", "--max-model-len", "auto")
    with ServeProcess.tiny(tiny_model, "--scheduling-policy", "priority", *small) as server:
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 8192  # 512 blocks of 16
        ends = {}

        def ask(priority):
            body = {"prompt": f"{priority}", "max_tokens": 20, "ignore_eos": True, "priority": priority}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            ends[priority] = time.monotonic()

        threads = [threading.Thread(target=ask, args=(priority,)) for priority in (5, 1)]
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "max_tokens": 8000}) as running:
            lines = running.iter_lines()  # kept: httpx closes the response when the iterator goes
            next(lines)  # it runs, the others must wait
            for number, thread in enumerate(threads, 1):
                thread.start()
                server.wait_for("vllm:num_requests_waiting", number)
        for thread in threads:
            thread.join()
    assert ends[1] < ends[5]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["/no/such/folder"], 1, "/no/such/folder"),
        (["{model}", "--max-model-len", "99999"], 2, "--max-model-len 99999"),
        (["{model}", "--max-num-seqs", "64", "--max-num-batched-tokens", "32"], 2, "--max-num-batched-tokens 32"),
        (["{model}", "--generation-config", "/no/such/file"], 2, "--generation-config"),
        (["{model}", "--override-generation-config", '{"temperature": 9}'], 2, "generation config"),
        (["{model}", "--chat-template", "/no/such/template"], 2, "--chat-template"),
        (["{model}"], 1, "safetensors"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_start_says_so_in_two_lines(tiny_model, arguments, code, text):
    command = [sys.executable, "-m", "kvctl", "serve", "--port", "0", "--log-level", "error"]
    command += [argument.replace("{model}", str(tiny_model)) for argument in arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert answer.returncode == code, answer.stderr
    assert text in answer.stderr and "Traceback" not in answer.stderr
    assert len(answer.stderr.strip().splitlines()) <= 3
