"""Start `kvctl serve` with the demo model, ask one question, print the streamed answer and its speed, keep serving.

The second half of scripts/quickstart, which makes the environment first. Needs only httpx and an installed kvctl.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

READY_LIMIT_S = 180.0
STOP_LIMIT_S = 30.0
QUESTION = "Give me three tips for a good night's sleep."


def free_port(wanted: int) -> int:
    """Return `wanted` if nobody listens there, else a port that the system picks."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            probe.bind(("127.0.0.1", 0))
            print(f"Port {wanted} is taken.")
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(arguments: list[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `kvctl serve` with its output in `log`; stop it at the end, politely first."""
    with log.open("wb") as out:
        server = subprocess.Popen([sys.executable, "-m", "kvctl", "serve", *arguments], stdout=out, stderr=out)
    try:
        yield server
    finally:
        if server.poll() is None:
            server.terminate()
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_ready(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until /health answers 200.

    Raises:
        SystemExit: the server ended or took too long; the end of its log is shown.
    """
    deadline = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    state = "took too long to start" if server.poll() is None else f"ended with exit code {server.returncode}"
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
    sys.exit(f"quickstart: the server {state}. The end of {log}:\n{tail}")


def ask(url: str, question: str) -> None:
    """Send one streamed chat request; print the answer as it arrives, then its TTFT and speed."""
    key = os.environ.get("KVCTL_API_KEY") or os.environ.get("VLLM_API_KEY")  # the server asks for it then
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, timeout=120, trust_env=False, headers=headers) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 128,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        print(f"\nyou:  {question}\n{model}:\n", flush=True)
        start = time.perf_counter()
        first = last = 0.0
        usage: dict[str, int] = {}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                sys.exit(f"quickstart: HTTP {response.status_code}: {response.read().decode(errors='replace')[:500]}")
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data:"))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content") or ""
                    if text:
                        last = time.perf_counter()
                        first = first or last
                        print(text, end="", flush=True)
    if not first:
        sys.exit("\nquickstart: the answer is empty")
    tokens = usage.get("completion_tokens", 0)
    speed = f", then {(tokens - 1) / (last - first):.1f} tokens/s" if tokens > 1 and last > first else ""
    print(f"\n\n  first token after {(first - start) * 1e3:.0f} ms{speed} ({tokens} tokens)\n", flush=True)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the command line into ours and, behind `--`, that of `kvctl serve`."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--question", default=QUESTION)
    return parser.parse_args(arguments[:cut]), arguments[cut + 1 :]


def main() -> int:
    options, serve_options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is stopped too
    prepare = [sys.executable, str(Path(__file__).with_name("prepare_demo.py"))]
    if code := subprocess.run(prepare, stdout=subprocess.DEVNULL, check=False).returncode:
        return code
    port = free_port(options.port)
    url = f"http://127.0.0.1:{port}"
    log = Path(sys.prefix) / "kvctl-serve.log"
    print(f"Starting kvctl serve on {url} (its log: {os.path.relpath(log)}) ...", flush=True)
    start = time.monotonic()
    with running_server(["--port", str(port), *serve_options], log) as server:
        wait_ready(url, server, log)
        print(f"Ready after {time.monotonic() - start:.1f} s.", flush=True)
        try:
            ask(url, options.question)
        except httpx.HTTPError as error:
            sys.exit(f"\nquickstart: the request failed: {error}. The server's log: {log}")
        if not options.once:
            print(f"Still serving on {url}; Ctrl-C stops it. Try another question from another terminal:\n")
            print(
                f"""  curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{{"messages": [{{"role": "user", "content": "Who are you?"}}]}}'\n""",
                flush=True,
            )
            code = server.wait()
            print(f"The server ended with exit code {code}; its log: {log}")
            return code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped.")
        sys.exit(130)
