"""scripts/kernel_report.py: the kernels compile for a GPU here, where there is none, and keep the table's promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kernel_report.py"


@pytest.mark.slow
def test_one_configuration_of_every_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--json", "--arch", "sm_90", "--config"]
    rows = []
    for config in ("D128 bf16", "N4096", "N1024"):  # attention and stores, norms, the race
        ran = subprocess.run([*command, config], capture_output=True, text=True, check=False, env=environment)
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
        rows += json.loads(ran.stdout)["rows"]
    assert {row["kernel"] for row in rows} == {
        "paged_decode", "paged_prefill", "norm_rotary_store_kv", "store_kv", "rms_norm", "race",
    }  # fmt: skip
    assert all(row["spill_bytes"] == 0 and row["registers"] > 0 for row in rows)
    decode = next(row for row in rows if row["kernel"] == "paged_decode")
    assert decode["instructions"]["kv_buffers"] >= 2 and decode["instructions"]["tensor"] > 0
    assert decode["instructions"]["loads_128"] > 0
