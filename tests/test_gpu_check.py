"""scripts/gpu_check.py on tiny shapes, as it is rehearsed where there is no GPU."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
# What a bare GPU machine has not: the check must do without, in all its processes.
ABSENT = ("fastapi", "uvicorn", "zmq", "msgspec", "gguf", "accelerate", "textual", "httptools", "xxhash", "psutil")


def test_the_gpu_check_can_be_rehearsed_without_a_gpu_and_without_the_servers_packages(tmp_path: Path) -> None:
    shadows = tmp_path / "absent"
    shadows.mkdir()
    for name in ABSENT:
        (shadows / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    path = os.pathsep.join([str(shadows), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {name: part["rows"] for name, part in found["parts"].items()}
    assert list(parts) == [
        "environment", "ceilings", "attention", "layers", "tiny_engine", "decode", "prefill", "cascade", "splits",
        "layer_speed", "engine_graphs", "engine_eager", "engine_fp8", "memory_checker",
    ]  # fmt: skip
    assert not any(part["error"] for part in found["parts"].values())
    assert all(row["error"] < 6e-3 for row in parts["attention"]) and len(parts["attention"]) == 7
    assert all(row["ok"] for row in parts["layers"]) and len(parts["layers"]) == 15
    assert all(row["agreement_with_cpu"] == 1.0 and row["equals_eager"] for row in parts["tiny_engine"])
    runs = [row["run"] for name in ("engine_graphs", "engine_eager", "engine_fp8") for row in parts[name]]
    assert {"graphs", "eager", "fp8 KV", "decode step, graphs", "shared 64-token prefix, cascade off"} <= set(runs)
    assert all(isinstance(row["predicted"], int) for row in parts["engine_fp8"] if "predicted" in row)
    assert {target["verdict"] for target in found["targets"]} == {"not measured"}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec.loader.exec_module(module)
    return module


def test_a_part_that_dies_or_hangs_leaves_its_rows_and_is_told(check, tmp_path: Path, monkeypatch) -> None:
    report = check.Report(tmp_path)
    script = tmp_path / "part.py"
    script.write_text(
        "import os, sys, time\n"
        'print(\'@row {"part": "speed", "row": {"case": 1}}\', flush=True)\n'
        "time.sleep(30) if 'hang' in sys.argv[2] else os.abort()\n"
    )
    monkeypatch.setattr(check, "__file__", str(script))
    args = argparse.Namespace(out=tmp_path, dry_run=False)
    check.run_process(report, ("crash",), 5, args)
    check.run_process(report, ("hang",), -4.5, args)
    part = json.loads((tmp_path / "gpu_check.json").read_text())["parts"]["speed"]
    assert part["rows"][0] == {"case": 1} and "ended with code -6" in part["error"]
    assert not report.is_fine


def test_targets_are_judged_by_the_worst_row(check) -> None:
    from gpucheck.targets import judge

    def part(*rows: dict) -> dict:
        return {"rows": list(rows), "error": None}

    parts = {
        "decode": part(
            {"kv_gb": 2, "measured_us": 1, "percent_of_copy_rate": 85},
            {"kv_gb": 0.1, "measured_us": 1, "percent_of_copy_rate": 20},
        ),
        "prefill": part(
            {"measured_us": 1, "percent_of_matmul_rate": 70}, {"measured_us": 1, "percent_of_matmul_rate": 41}
        ),
        "engine_graphs": part(
            {"run": "graphs", "error_percent": -1.2}, {"run": "decode step, graphs", "overhead": 1.1}
        ),
        "engine_eager": part({"run": "decode step, eager", "overhead": 3.0}),
    }
    assert [target["verdict"] for target in judge(parts)] == ["met", "missed", "met", "met"]
