"""NVIDIA's memory checker over one small decode, prefill and cascade, where the tool is there."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpucheck.bench import Bench

_TOOL = "compute-sanitizer"
_CODE = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from pathlib import Path
from gpucheck.cases import Case
from gpucheck.kernels import check_attention
for queries, lengths, shared in (((1, 1), (33, 70), 0), ((9, 20), (33, 70), 0), ((1, 1), (40, 50), 32)):
    assert check_attention(Case(8, 2, 64, torch.bfloat16, queries, lengths, shared=shared), False)["ok"]
torch.cuda.synchronize()
"""


def memory_checker(bench: Bench) -> Iterator[dict[str, Any]]:
    """Every access in bounds; torch's allocator hands out each tensor by itself, so that an overrun is one."""
    tool = shutil.which(_TOOL) or shutil.which(_TOOL, path="/usr/local/cuda/bin")
    if bench.dry or tool is None:
        yield {"skipped": f"no {_TOOL} here"}
        return
    scripts = Path(__file__).resolve().parents[1]
    folders = [str(folder) for folder in (scripts, scripts.parent, scripts.parent / "kernels")]
    command = [tool, "--error-exitcode", "9", sys.executable, "-c", _CODE, *folders]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False, env=environment)
    except subprocess.TimeoutExpired:
        yield {"skipped": "not done after 40 s"}
        return
    lines = (done.stdout + done.stderr).strip().splitlines()
    yield {"exit": done.returncode, "ok": done.returncode == 0, "summary": lines[-3:]}
