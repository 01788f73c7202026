"""Runs the scripted server in a process of its own, so that it does not share an interpreter with what measures it.

`start_mock_process` starts one and reads its port; `python -m kvctl.bench.mock_process JSON` is what it starts. Ends
the process on the way out, whatever happened; if the starter itself is killed, the end of standard input ends it.
Floor 3.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from kvctl.bench.mock_script import MockScript
from kvctl.errors import ServerUnreachable


@contextmanager
def start_mock_process(script: MockScript) -> Iterator[str]:
    """Yield the address of a scripted server on this machine.

    Raises:
        ServerUnreachable: it does not start.
    """
    command = [sys.executable, "-m", "kvctl.bench.mock_process", json.dumps(asdict(script))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise ServerUnreachable("the scripted server does not start", hint="Try: kvctl bench mock")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_starter() -> None:
    sys.stdin.buffer.read()  # nobody writes: this returns when the starter is gone
    os._exit(0)


def main() -> None:
    """Serve the script given as JSON until terminated or left alone; print the port."""
    from kvctl.bench.mock_server import run_mock

    threading.Thread(target=_end_with_starter, daemon=True).start()
    run_mock(MockScript(**json.loads(sys.argv[1])), "127.0.0.1", 0, lambda port: print(port, flush=True))


if __name__ == "__main__":
    main()
