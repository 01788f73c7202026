"""A scripted server in a process of its own, one per script and test module."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvctl.bench.mock_process import start_mock_process
from kvctl.bench.mock_script import MockScript

FAST = {"ttft_s": 0.02, "gap_s": 0.002, "tokens": 8}


@pytest.fixture(scope="module")
def mock_server() -> Iterator:
    """`mock_server(tokens=4, ...)` is the address of a server with that script."""
    running = {}
    with ExitStack() as stack:

        def start(**fields) -> str:
            script = MockScript(**{**FAST, **fields})
            if script not in running:
                running[script] = stack.enter_context(start_mock_process(script))
            return running[script]

        yield start
