"""The command's body: configuration, run or search, files, tables, exit code. Knows consoles and files.

Exit codes: 0 valid; 1 nothing completed; 5 too many errors; 6 the client was the limit; 130 interrupted. Floor 3.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console

from kvctl.bench.outputs import as_csv, as_json, as_vllm_json, check_writable, write_text
from kvctl.bench.runner import Progress, measure, prepare
from kvctl.bench.settings import BenchOptions, make_config
from kvctl.bench.terminal import SilentProgress, TerminalProgress, render_result, stderr_console
from kvctl.errors import ConfigError, KvctlError

EXIT_NOTHING, EXIT_ERRORS, EXIT_CLIENT_LIMITED, EXIT_INTERRUPTED = 1, 5, 6, 130


@dataclass(frozen=True)
class OutputOptions:
    """Where results go, and which search is run."""

    sweep: str | None = None
    find: str | None = None
    slo_share: float = 0.95
    repeats: int = 1
    json_file: Path | None = None
    csv_file: Path | None = None
    html_file: Path | None = None
    json_format: str = "kvctl"
    quiet: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of the options."""
        return tuple(entry.name for entry in fields(cls))


def run_bench(options: BenchOptions, outputs: OutputOptions) -> int:
    """Run what was asked for; returns the exit code.

    Raises:
        KvctlError: nothing could be measured, or a file could not be written.
    """
    if outputs.json_format not in ("kvctl", "vllm"):
        raise ConfigError(f"unknown format {outputs.json_format!r}", hint="One of: kvctl, vllm.")
    if not 0 < outputs.slo_share <= 1:
        raise ConfigError(f"--slo-share {outputs.slo_share:g} is no share", hint="Give more than 0, at most 1.")
    if outputs.repeats < 1:
        raise ConfigError(f"--repeats {outputs.repeats} is none", hint="Give --repeats 1 or more.")
    for path in (outputs.json_file, outputs.csv_file, outputs.html_file):
        check_writable(path)
    config = make_config(options)
    progress: Progress = SilentProgress() if outputs.quiet else TerminalProgress(stderr_console(), live=True)
    if outputs.sweep is not None or outputs.find is not None:
        from kvctl.bench.search_command import run_search

        return run_search(config, outputs, progress)
    prepared = prepare(config, progress)
    result, _ = measure(config, prepared, progress)
    problem = write_outputs(result, [result], outputs)
    if not outputs.quiet and str(outputs.json_file) != "-":
        Console().print(render_result(result))
    if problem is not None:
        raise problem
    return exit_code(result, options.max_error_rate)


def write_outputs(
    result: Mapping[str, Any], runs: list[Mapping[str, Any]], outputs: OutputOptions
) -> KvctlError | None:
    """Write all files that were asked for; returns the first problem, after trying them all."""
    problem: KvctlError | None = None
    texts: list[tuple[Path, Callable[[], str]]] = []
    if outputs.json_file is not None:
        value: object = result
        if outputs.json_format == "vllm":  # a sweep or search is a list of them
            value = as_vllm_json(result) if "summary" in result else [as_vllm_json(run) for run in runs]
        texts.append((outputs.json_file, lambda: as_json(value)))
    if outputs.csv_file is not None:
        texts.append((outputs.csv_file, lambda: as_csv(runs)))
    if outputs.html_file is not None:
        from kvctl.bench.html_report import render_html

        texts.append((outputs.html_file, lambda: render_html(result)))
    for path, make_text in texts:
        try:
            write_text(path, make_text())
        except KvctlError as error:
            problem = problem or error
    return problem


def exit_code(result: Mapping[str, Any], max_error_rate: float) -> int:
    """What the result means for a script."""
    summary = result["summary"]
    total = summary["completed"] + summary["failed"]
    if result["interrupted"]:
        return EXIT_INTERRUPTED
    if result["stopped_by_errors"] or (total and summary["failed"] / total > max_error_rate):
        return EXIT_ERRORS
    if not summary["completed"]:
        return EXIT_NOTHING
    return EXIT_CLIENT_LIMITED if result["client"]["verdict"] != "valid" else 0


def run_compare(before: Path, after: Path, fail_if: list[str], json_file: Path | None) -> int:
    """Compare two result files; returns 5 when a condition of `fail_if` holds.

    Raises:
        KvctlError: a file is no result.
    """
    from kvctl.bench.compare import compare_results, load_result, render_comparison

    comparison = compare_results(load_result(before), load_result(after), fail_if)
    if json_file is not None:
        write_text(json_file, as_json(comparison))
    if str(json_file) != "-":
        Console(file=sys.stdout).print(render_comparison(comparison))
    return EXIT_ERRORS if comparison["failed"] else 0
