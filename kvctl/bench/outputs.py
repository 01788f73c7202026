"""Writes results to files so that nothing is lost: checked before the run, written whole or not at all. Floor 3."""

import contextlib
import csv
import io
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError


def check_writable(path: Path | None) -> None:
    """Make sure, before an hour of load, that a file can be written.

    Raises:
        ConfigError: it cannot.
    """
    if path is None or str(path) == "-":
        return
    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="Choose another file.") from None


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; when that fails, to the temporary folder instead, and say where.

    Raises:
        KvctlError: it could not be written there; where the text is now is in the hint.
    """
    if str(path) == "-":
        _print_whole(text)
        return
    try:
        _replace(path, text)
    except OSError as error:
        rescued = _rescue(path.name, text)
        hint = f"It was saved as {rescued}." if rescued else "It could not be saved elsewhere either."
        raise KvctlError(f"cannot write {path}: {error.strerror}", hint=hint) from None


def _print_whole(text: str) -> None:
    """Print a text of any size. With PYTHONUNBUFFERED, print() drops what a pipe does not take in one go."""
    sys.stdout.flush()
    binary = getattr(sys.stdout, "buffer", None)
    if binary is None:  # stdout stands for something else, e.g. in a notebook
        sys.stdout.write(text)
        return
    left = memoryview(text.encode())
    while left:
        left = left[binary.write(left) or 0 :]
    binary.flush()


def _replace(path: Path, text: str) -> None:
    if path.exists() and not path.is_file():  # a device or a pipe: nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # noqa: PTH101 - a name from mkstemp
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def _rescue(name: str, text: str) -> str | None:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="kvctl-bench-", suffix=f"-{name}", delete=False, encoding="utf-8"
        ) as file:
            file.write(text)
            return file.name
    except OSError:
        return None


def as_json(result: object) -> str:
    """The result as JSON text (no NaN: what is not known is null)."""
    return json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


_CSV_LATENCIES = ("ttft_ms", "ttft_due_ms", "ttfo_ms", "tpot_ms", "gap_ms", "max_gap_ms", "e2e_ms")
_CSV_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "n")


def as_csv(results: list[Mapping[str, Any]]) -> str:
    """One line per run: the load, counts, throughputs, latencies, verdict."""
    rows = [_csv_row(result) for result in results]
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(result: Mapping[str, Any]) -> dict[str, Any]:
    config, summary, client = result["config"], result["summary"], result["client"]
    load, server, goodput = config["load"], result["server"] or {}, summary["goodput"] or {}
    steady = summary["steady"] or {}
    arrivals = load["arrivals"] or {"segments": [[None]]}
    row: dict[str, Any] = {
        "date": config["date"],
        "url": config["url"],
        "model": config["model"],
        "workload": config["workload"]["name"],
        "concurrency": load["concurrency"],
        "rate": arrivals["segments"][0][0],
        "seed": load["seed"],
        "completed": summary["completed"],
        "failed": summary["failed"],
        "duration_s": summary["duration_s"],
        "request_throughput": summary["request_throughput"],
        "output_throughput": summary["output_throughput"],
        "total_throughput": summary["total_throughput"],
        "steady_output_throughput": steady.get("output_throughput"),
        "input_tokens_mean": summary["input_tokens"]["mean"],
        "output_tokens_mean": summary["output_tokens"]["mean"],
        "tokens_per_event": summary["tokens_per_event"],
        "goodput_share": goodput.get("share"),
        "goodput_requests_per_s": goodput.get("requests_per_s"),
    }
    for name in _CSV_LATENCIES:
        for statistic in _CSV_STATISTICS:
            row[f"{name.removesuffix('_ms')}_{statistic}{'' if statistic == 'n' else '_ms'}"] = summary[name][statistic]
    row |= {
        "late": client["late"],
        "never_sent": client["never_sent"],
        "lag_p99_ms": client["lag_ms"]["p99"],
        "verdict": client["verdict"],
        "prefix_hit_rate": server.get("prefix_hit_rate"),
        "kv_usage_max": server.get("kv_usage_max"),
        "waiting_max": server.get("waiting_max"),
        "preemptions": server.get("preemptions"),
    }
    return row


def as_vllm_json(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result under the field names that `vllm bench serve --save-result` writes, for scripts that read those.

    The meanings are ours (see `definitions`): `itl` holds our gap, TTFT does not start at an empty role delta.
    Source of the names: vLLM 0.32, the JSON of `vllm bench serve`.
    """
    config, summary = result["config"], result["summary"]
    load = config["load"]
    arrivals = load["arrivals"]
    goodput = summary["goodput"]
    flat: dict[str, Any] = {
        "date": config["date"].replace("-", "").replace(":", "").replace("T", "-")[:15],
        "endpoint_type": "openai-chat" if "chat" in config["endpoint"] else "openai",
        "backend": "openai-chat" if "chat" in config["endpoint"] else "openai",
        "label": None,
        "model_id": config["model"],
        "tokenizer_id": None,
        "num_prompts": summary["completed"] + summary["failed"],
        "request_rate": arrivals["segments"][0][0] if arrivals else "inf",
        "burstiness": arrivals["burstiness"] if arrivals else 1.0,
        "max_concurrency": load["concurrency"] or load["max_in_flight"],
        "duration": summary["duration_s"],
        "completed": summary["completed"],
        "failed": summary["failed"],
        "total_input_tokens": summary["input_tokens"]["total"] or 0,
        "total_output_tokens": summary["output_tokens"]["total"],
        "request_throughput": summary["request_throughput"],
        "request_goodput": goodput["requests_per_s"] if goodput else None,
        "output_throughput": summary["output_throughput"],
        "total_token_throughput": summary["total_throughput"],
        "max_output_tokens_per_s": max(result["timeline"]["output_tokens_per_s"], default=0.0),
        "max_concurrent_requests": summary["max_in_flight"],
    }
    for ours, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("gap_ms", "itl"), ("e2e_ms", "e2el")):
        values = summary[ours]
        flat[f"mean_{theirs}_ms"] = values["mean"]
        flat[f"median_{theirs}_ms"] = values["p50"]
        flat[f"std_{theirs}_ms"] = values["std"]
        for percent in (90, 95, 99):
            flat[f"p{percent}_{theirs}_ms"] = values[f"p{percent}"]
    flat["kvctl_verdict"] = result["client"]["verdict"]
    return flat
