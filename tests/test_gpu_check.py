"""scripts/gpu_check.py on tiny shapes, as it is rehearsed where there is no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
# What a bare GPU machine has not: the check must do without.
ABSENT = ("fastapi", "uvicorn", "zmq", "msgspec", "gguf", "accelerate", "textual", "httptools")
RUN = (
    "import runpy, sys\n"
    f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    "sys.argv = sys.argv[1:]\n"
    "runpy.run_path(sys.argv[0], run_name='__main__')\n"
)


def test_the_gpu_check_can_be_rehearsed_without_a_gpu_and_without_the_servers_packages(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    parts = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(parts) == [
        "environment", "ceilings", "correctness", "tiny_engine", "speed", "big_engine", "sanitizer",
    ]  # fmt: skip
    assert parts["correctness"]["result"]["worst_relative_error"] < 6e-3
    assert parts["tiny_engine"]["result"]["agreement_with_cpu"] == 1.0
    runs = [row["run"] for row in parts["big_engine"]["result"]]
    assert {"graphs", "eager", "fp8 KV", "decode step", "shared 64-token prefix, cascade off"} <= set(runs)
