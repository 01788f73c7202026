#!/usr/bin/env python3
"""Compile every Triton kernel for every GPU architecture (no GPU needed) and print registers, spills, shared memory.

    scripts/kernel_report.py [--arch sm_90] [--kernel NAME] [--json] [--write]

The first run takes minutes, later ones use Triton's cache. Exit code 1 if any row breaks a promise of the table: it
compiles, spills nothing, fits the shared memory, uses tensor instructions and 128-bit loads, and double-buffers K and V
in decode.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels"))

import triton
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvctl_kernels import aot
from kvctl_kernels.configs import ARCHS

README = Path(__file__).resolve().parent.parent / "kernels" / "README.md"
HEADERS = ["kernel", "config", "arch", "regs", "spill B", "shared B", "tensor", "ld128", "KV bufs", "verdict"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=ARCHS, help="only this architecture (may be repeated)")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument("--config", default="", help="only configurations with this in their name, like 'D128 bf16'")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="store the table in kernels/README.md")
    args = parser.parse_args()
    wanted = [
        case
        for case in aot.cases(tuple(args.arch or ARCHS))
        if args.kernel in (None, case.kernel) and args.config in case.label
    ]
    rows = []
    with Progress(console=Console(stderr=True), disable=args.json, transient=True) as progress:
        task = progress.add_task("compiling", total=len(wanted))
        for _, cases in itertools.groupby(wanted, key=lambda case: case.arch):
            # Fresh processes for each: Triton 3.6 keeps the float8 conversions of the first one it compiles for.
            with ProcessPoolExecutor(os.cpu_count()) as pool:
                for row in pool.map(aot.compile_case, cases):
                    rows.append(row)
                    progress.advance(task)
    if args.json:
        json.dump({"rows": [dataclasses.asdict(row) for row in rows]}, sys.stdout, indent=1)
        print()
    else:
        print_table(rows)
    if args.write:
        write_readme(rows)
    return 0 if all(row.ok for row in rows) else 1


def cells(row: aot.Row) -> list[str]:
    seen = row.instructions
    verdict = "ok" if row.ok else "; ".join(row.problems)
    numbers = [row.registers, row.spill_bytes, row.shared_bytes, seen.get("tensor", 0), seen.get("loads_128", 0)]
    return [row.kernel, row.config, row.arch, *map(str, numbers), str(seen.get("kv_buffers", "-")), verdict]


def verdict(rows: list[aot.Row]) -> str:
    bad = sum(not row.ok for row in rows)
    return f"{len(rows)} rows, {bad} broken" if bad else f"{len(rows)} rows, all as promised"


def write_readme(rows: list[aot.Row]) -> None:
    """Replace this Triton's part of kernels/README.md."""
    version = triton.__version__
    name = f"report of Triton {version}"
    lines = [
        f"Compiled on {datetime.date.today()} with Triton {version}: {verdict(rows)}.\n",
        "| " + " | ".join(HEADERS) + " |\n" + "|---" * len(HEADERS) + "|",
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    text, count = re.subn(
        rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)",
        lambda found: found[1] + "\n".join(lines) + "\n" + found[2],
        README.read_text(),
        flags=re.DOTALL,
    )
    if not count:
        sys.exit(f"kernel_report: {README} has no part <!-- begin {name} --> ... <!-- end {name} -->")
    README.write_text(text)


def print_table(rows: list[aot.Row]) -> None:
    table = Table(*HEADERS, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*cells(row), style="" if row.ok else "red")
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    print(verdict(rows))


if __name__ == "__main__":
    sys.exit(main())
