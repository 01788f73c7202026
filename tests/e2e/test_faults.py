"""Processes that are killed, suspended or in each other's way, clocks that jump, ten thousand clients, secrets."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.serve_process import ServeProcess

ASK = {"prompt": "a question", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
WALL_CLOCK_JUMPS = """
import itertools, time
_true, _jumps = time.time, itertools.cycle((0, 4e7, -4e7))
time.time = lambda: _true() + next(_jumps)
"""


def ask(url, **changes):
    return httpx.post(f"{url}/v1/completions", json={**ASK, **changes}, timeout=60)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_whichever_process_is_killed_the_other_ends_and_a_new_server_serves_on_the_same_port(tiny_model):
    port = str(free_port())
    with ServeProcess.tiny(tiny_model, "--port", port) as first:
        expected = ask(first.url).json()["choices"][0]["text"]
        engine = first.engine_pid()
        with httpx.stream("POST", f"{first.url}/v1/completions", json={**ASK, "max_tokens": 400, "stream": True}) as s:
            lines = s.iter_lines()
            next(lines)
            first.process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        wait_until(lambda: not is_running(engine))
    for _ in range(2):  # as `Restart=on-failure` of a supervisor would
        with ServeProcess.tiny(tiny_model, "--port", port) as server:
            assert ask(server.url).json()["choices"][0]["text"] == expected
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert server.wait() == 1


def test_a_suspended_engine_loses_nothing_and_cannot_keep_the_server_from_ending(tiny_model):
    with ServeProcess.tiny(tiny_model) as server:
        expected = ask(server.url).json()["choices"][0]["text"]
        engine = server.engine_pid()
        os.kill(engine, signal.SIGSTOP)
        with pytest.raises(httpx.ReadTimeout):  # its request must be aborted all the same
            httpx.post(f"{server.url}/v1/completions", json={**ASK, "max_tokens": 400}, timeout=0.5)
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        os.kill(engine, signal.SIGCONT)
        assert ask(server.url).json()["choices"][0]["text"] == expected
        server.wait_idle()
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        os.kill(engine, signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert not is_running(engine)


def test_a_wall_clock_that_jumps_changes_no_answer_and_no_latency(server, tiny_model, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WALL_CLOCK_JUMPS)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    expected = ask(server.url, n=3, temperature=1, seed=1).json()["choices"]
    jumping = ServeProcess.tiny(tiny_model)
    jumping.environment["PYTHONPATH"] = path
    with jumping as server:
        created = {ask(server.url).json()["created"] for _ in range(3)}
        assert max(created) - min(created) > 3e7, "the clock does not jump: the test shows nothing"
        assert ask(server.url, n=3, temperature=1, seed=1).json()["choices"] == expected
        server.wait_idle()
        for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
            assert 0 <= server.metric(f"vllm:{name}_seconds_sum") < 60, name
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 6


def test_ten_thousand_idle_connections_disturb_nobody(server):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = []
    try:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        for index in range(min(10_000, hard - 500)):
            clients.append(socket.create_connection(address))
            if index % 3 == 0:
                clients[-1].send(b"POST /v1/comp")  # and never goes on
        assert ask(server.url).status_code == 200
    finally:
        for client in clients:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    wait_until(lambda: len(list(descriptors.iterdir())) < 200)
    server.wait_idle()


def limited(tiny_model, *limits):
    """A server in a shell's limits."""
    process = ServeProcess.tiny(tiny_model)
    process.command = ["sh", "-c", f'ulimit {" ".join(limits)} && exec "$@"', "sh", *process.command]
    return process


def test_a_server_without_free_descriptors_answers_again_when_there_are_some(tiny_model):
    with limited(tiny_model, "-n", "150") as server:
        expected = ask(server.url).json()["choices"][0]["text"]
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        clients = [socket.create_connection(address) for _ in range(250)]
        descriptors = Path(f"/proc/{server.process.pid}/fd")
        wait_until(lambda: len(list(descriptors.iterdir())) >= 149)
        for client in clients:
            client.close()
        assert ask(server.url).json()["choices"][0]["text"] == expected
        assert server.process.poll() is None
        wait_until(lambda: len(list(descriptors.iterdir())) < 100)


def test_no_room_for_compiled_kernels_costs_speed_only(tiny_model, tmp_path):
    """A limit on the size of a file stands for the full disk, a program that writes a megabyte for the compiler."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\nwhile [ $# -gt 1 ] && [ "$1" != -o ]; do shift; done\n'
        '[ "$1" = -o ] || { echo 1.0; exit; }\nhead -c 1000000 /dev/zero >"$2"\n'
    )
    compiler.chmod(0o755)
    process = limited(tiny_model, "-f", "100")
    process.environment |= {"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path), "CXX": str(compiler)}
    with process as server:
        assert ask(server.url).status_code == 200
        engine = httpx.get(f"{server.url}/health").json()["engine"]
        assert engine["attention_backend"] == engine["linear_backend"] == "torch"
    assert "c++ exited with" in server.final_log and "Traceback" not in server.final_log
    assert not list(tmp_path.rglob("*.so*"))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--port", "{taken}"], 1, "--port"),
        (["--port", "0", "--kv-cache-memory-bytes", "900TiB"], 4, "--kv-cache-memory-bytes"),
    ],
    ids=["port taken", "out of memory"],
)
def test_what_stands_in_its_way_at_start_is_told_in_two_lines(tiny_model, arguments, code, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "kvctl", "serve", str(tiny_model), "--load-format", "dummy"]
        command += ["--log-level", "error", *(argument.replace("{taken}", port) for argument in arguments)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == code
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 2 and said in lines[1], ended.stderr


def test_no_key_and_no_prompt_reaches_the_log_or_the_metrics(tiny_model):
    secrets = ("k3y-of-the-server", "k3y-of-a-stranger", "pr0mpt-of-a-client", "s4lt-of-a-tenant")
    flags = ("--api-key", secrets[0], "--enable-log-requests", "--log-level", "debug")
    with ServeProcess.tiny(tiny_model, *flags) as server:
        body = {**ASK, "prompt": secrets[2], "cache_salt": secrets[3], "user": secrets[2]}
        body |= {"stop": [secrets[2]], "bad_words": [secrets[2]]}
        for key, status in ((secrets[0], 200), (secrets[1], 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == status
        broken = json.dumps({"prompt": {secrets[2]: 1}})
        headers = {"Authorization": f"Bearer {secrets[0]}", "Content-Type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=broken, headers=headers).status_code == 400
        pages = [httpx.get(f"{server.url}{path}").text for path in ("/metrics", "/health", "/openapi.json")]
    for text in (server.final_log, *pages):
        assert not [secret for secret in secrets if secret in text]
    assert "request" in server.final_log


def test_another_tenants_prefix_shows_in_nothing_where_salts_differ(server):
    """What a timing probe measures is how many prompt tokens the server computed; without a salt it tells."""
    prompt = "the secret plan of a tenant, long enough for several blocks of tokens. " * 2

    def probe(salt):
        server.wait_idle()
        before = server.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
        usage = ask(server.url, prompt=prompt, cache_salt=salt).json()["usage"]
        server.wait_idle()
        computed = server.metric("vllm:prompt_tokens_by_source_total", source="local_compute") - before
        return usage["prompt_tokens_details"]["cached_tokens"], computed, usage["prompt_tokens"]

    cached, computed, all_tokens = probe("tenant-a")
    assert (cached, computed) == (0, all_tokens)
    assert probe("tenant-b")[:2] == (0, all_tokens), "tenant b sees what tenant a has asked"
    assert probe(None)[:2] == (0, all_tokens), "nor does one without a salt"
    cached, computed, _ = probe("tenant-a")
    assert cached > 0 and computed == all_tokens - cached, "its own prefix a tenant finds again"
    cached, computed, _ = probe(None)
    assert cached > 0 and computed < all_tokens, "without a salt the probe tells"
