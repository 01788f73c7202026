"""The soak of scripts/soak.py, a minute of it, over a tiny model: more requests and more preemptions per second."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.serve_process import save_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_minute_of_everything_at_once_loses_nothing(tmp_path):
    model = str(save_tiny_model(tmp_path, max_model_len=4096))
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--minutes", "1", "--model", model]
    flags = ["--load-format", "dummy", "--threads", "1"]
    ended = subprocess.run([*command, "--", *flags], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 violations" in ended.stdout
