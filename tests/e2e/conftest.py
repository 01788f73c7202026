"""One server for the tests that only ask it something; those that end or configure one start their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serve_process import ServeProcess, save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[ServeProcess]:
    with ServeProcess.tiny(tiny_model, "--num-gpu-blocks-override", "200", "--max-num-seqs", "16") as process:
        yield process
