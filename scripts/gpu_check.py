#!/usr/bin/env python3
"""Check and measure the whole GPU path on a real card, in six minutes; results are written row by row.

    scripts/gpu_check.py --out DIR             on a GPU box (torch, triton, numpy, transformers; no server packages)
    scripts/gpu_check.py --out DIR --dry-run   anywhere: tiny shapes in Triton's interpreter, no timing

DIR/gpu_check.json grows with each row, and parts run in processes of their own: a run that is cut, a part that crashes
or hangs takes nothing of the others with it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "scripts")]
# Before anything imports triton: it reads the switch at import.
os.environ["TRITON_INTERPRET"] = "1" if "--dry-run" in sys.argv else "0"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

BUDGET_S = 355.0
# (parts that share a process, the seconds they may take)
PROCESSES = (
    (("environment", "ceilings"), 40),
    (("attention", "layers"), 80),
    (("tiny_engine",), 45),
    (("decode", "prefill", "cascade", "splits", "layer_speed"), 60),
    (("engine_graphs",), 80),
    (("engine_eager",), 40),
    (("engine_fp8",), 40),
    (("memory_checker",), 45),
)
_ROW = "@row "


class Report:
    """Rows by part, on disk after each one."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "gpu_check.json"
        self._started_s = time.monotonic()
        self.parts: dict[str, dict[str, Any]] = {}
        self.targets: list[dict[str, Any]] = []

    @property
    def elapsed_s(self) -> float:
        """Since the check began."""
        return time.monotonic() - self._started_s

    def add(self, part: str, row: dict[str, Any] | None = None, error: str | None = None) -> None:
        """Note a row or an error of a part."""
        found = self.parts.setdefault(part, {"rows": [], "error": None})
        if row is not None:
            found["rows"].append(row)
        found["error"] = found["error"] or error
        found["until_s"] = round(self.elapsed_s, 1)
        print(f"[{self.elapsed_s:6.1f} s] {part}: {error or json.dumps(row)[:300]}", flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        whole = self._path.with_suffix(".new")
        whole.write_text(json.dumps({"parts": self.parts, "targets": self.targets}, indent=1))
        whole.replace(self._path)

    @property
    def is_fine(self) -> bool:
        """Whether nothing broke and nothing is wrong; targets that are missed are not counted."""
        return all(not p["error"] and all(r.get("ok", True) for r in p["rows"]) for p in self.parts.values())


def run_process(report: Report, parts: tuple[str, ...], allowed_s: float, args: argparse.Namespace) -> None:
    """Run these parts in a process of their own and take in their rows; end it when its time is over."""
    command = [sys.executable, __file__, "--parts", ",".join(parts), "--allowed-s", f"{allowed_s:.0f}"]
    command += ["--out", str(args.out), *(["--dry-run"] if args.dry_run else [])]
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(allowed_s + 5, process.kill)
        timer.start()
        part = parts[0]
        for line in process.stdout or ():
            if not line.startswith(_ROW):
                print(line, end="")
                continue
            message = json.loads(line.removeprefix(_ROW))
            part = message["part"]
            report.add(part, message.get("row"), message.get("error"))
        timer.cancel()
        code = process.wait()
    if code:
        took = time.monotonic() - started
        report.add(part, error=f"its process ended with code {code} after {took:.0f} of {allowed_s:.0f} s")


def run_parts(names: list[str], args: argparse.Namespace) -> int:
    """In the process of these parts: print each row."""
    from gpucheck.bench import Bench
    from gpucheck.parts import PARTS

    bench = Bench(args.dry_run, args.allowed_s, args.out / "gpu_check.json")

    def tell(**message: Any) -> None:
        print(_ROW + json.dumps(message), flush=True)

    for name in names:
        try:
            for row in PARTS[name](bench):
                tell(part=name, row=row)
                if bench.is_late():
                    tell(part=name, row={"cut": "out of time"})
                    break
        except Exception as error:  # one broken part must not take the others with it; it is reported as broken
            traceback.print_exc()
            tell(part=name, error=f"{type(error).__name__}: {error}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--parts", help="run only these, in this process (what the check itself uses)")
    parser.add_argument("--allowed-s", type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parts:
        return run_parts(args.parts.split(","), args)
    if not args.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("gpu_check: no CUDA device here\n           --dry-run checks the script itself on the CPU.")
            return 1
    report = Report(args.out)
    if args.dry_run:
        run_process(report, tuple(name for names, _ in PROCESSES for name in names), 600, args)
    else:
        for names, most_s in PROCESSES:
            left_s = BUDGET_S - report.elapsed_s
            if left_s < 15:
                report.add(names[0], {"cut": "out of time"})
            else:
                run_process(report, names, min(most_s, left_s), args)
    from gpucheck.targets import judge

    report.targets = judge(report.parts)
    report.write()
    for target in report.targets:
        print(f"{target['verdict']:>12}  {target['target']}: {target['found']}")
    return 0 if report.is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
