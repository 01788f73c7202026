"""The object of `kvctl top --once --json`, and a reason for every null: the server does not say, or nothing happened.

Pure. Field names carry their units; a quantile is its bracket `[low, high]`, with null for an open end. Floor 3.
"""

import math
from typing import Any

from kvctl.metrics.histogram import Quantile
from kvctl.metrics.server_names import Server
from kvctl.top.gpu import GpuReading
from kvctl.top.monitor import EngineView, FleetView, worst_limit
from kvctl.top.snapshot import Distribution, Snapshot
from kvctl.top.verdict import Verdict

SCHEMA_VERSION = 1
SNAPSHOT_FIELDS = (  # there for every engine; all null where none could be read
    "engine",
    "model",
    "server",
    "window_s",
    "restarts",
    "running",
    "waiting",
    "waiting_by_reason",
    "kv_usage",
    "kv_tokens",
    "kv_used_tokens",
    "kv_bytes",
    "kv_used_bytes",
    "request_tokens",
    "request_tokens_source",
    "headroom_requests",
    "time_to_full_s",
    "prefix_hit_rate",
    "prefix_miss_tokens",
    "preemptions_per_s",
    "prompt_tokens_per_s",
    "computed_prompt_tokens_per_s",
    "generation_tokens_per_s",
    "requests_per_s",
    "rejected_per_s",
    "steps_per_s",
    "tokens_per_step",
    "ttft_s",
    "itl_s",
    "tpot_s",
    "e2e_s",
    "queue_s",
    "prefill_s",
    "decode_s",
    "step_duration_s",
    "speculative_acceptance",
    "speculative_accept_length",
    "offload_usage",
    "process_cpu_cores",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "block_size",
)


def fleet_to_json(fleet: FleetView, gpus: tuple[GpuReading, ...] = ()) -> dict[str, Any]:
    """Return the whole object; `verdict` is that of the first engine with the fleet's worst limit."""
    worst = worst_limit(fleet)
    chosen = next((view for view in fleet.engines if view.verdict.limit is worst), None)
    windows = [view.snapshot.window_s for view in fleet.engines if view.snapshot and view.snapshot.window_s]
    return {
        "schema_version": SCHEMA_VERSION,
        "at": round(fleet.at_s, 3),
        "window_s": _round(max(windows, default=None)),
        "engines": [_engine(view) for view in fleet.engines],
        "verdict": None if chosen is None else _verdict(chosen.verdict, chosen),
        "gpus": [gpu.to_json() for gpu in gpus],
    }


def _engine(view: EngineView) -> dict[str, Any]:
    found: dict[str, Any] = {
        "url": view.url,
        "error": view.error,
        "is_stale": view.is_stale,
        "age_s": _round(view.age_s),
        "num_rejected_lines": view.num_rejected_lines,
        "truncated": view.truncated,
    }
    found |= dict.fromkeys(SNAPSHOT_FIELDS) if view.snapshot is None else _snapshot(view.snapshot)
    found["verdict"] = _verdict(view.verdict, view)
    return found


def _snapshot(now: Snapshot) -> dict[str, Any]:
    size = now.request_size
    return {
        "engine": now.engine,
        "model": now.model or None,
        "server": now.server.value,
        "window_s": _round(now.window_s),
        "restarts": now.num_restarts,
        "running": _round(now.running),
        "waiting": _round(now.waiting),
        "waiting_by_reason": {
            "capacity": _round(now.waiting_capacity),
            "deferred": _round(now.waiting_deferred),
            **{reason: _round(value) for reason, value in now.waiting_reasons.items()},
        },
        "kv_usage": _round(now.kv_usage),
        "kv_tokens": now.kv_capacity_tokens,
        "kv_used_tokens": _round(now.kv_used_tokens),
        "kv_bytes": now.kv_cache_bytes,
        "kv_used_bytes": _round(now.kv_used_bytes),
        "request_tokens": None if size is None else _round(size.tokens),
        "request_tokens_source": None if size is None else size.source,
        "headroom_requests": now.headroom_requests,
        "time_to_full_s": _round(now.time_to_full_s),
        "prefix_hit_rate": _round(now.prefix_hit_rate),
        "prefix_miss_tokens": {reason: _round(value) for reason, value in now.miss_reasons.items()},
        "preemptions_per_s": _round(now.preemptions_per_s),
        "prompt_tokens_per_s": _round(now.prompt_tokens_per_s),
        "computed_prompt_tokens_per_s": _round(now.computed_prompt_tokens_per_s),
        "generation_tokens_per_s": _round(now.generation_tokens_per_s),
        "requests_per_s": _round(now.finished_per_s),
        "rejected_per_s": _round(now.rejected_per_s),
        "steps_per_s": _round(now.steps_per_s),
        "tokens_per_step": _spread(now.step_tokens),
        "ttft_s": _spread(now.ttft_s),
        "itl_s": _spread(now.itl_s),
        "tpot_s": _spread(now.tpot_s),
        "e2e_s": _spread(now.e2e_s),
        "queue_s": _spread(now.queue_s),
        "prefill_s": _spread(now.prefill_s),
        "decode_s": _spread(now.decode_s),
        "step_duration_s": _spread(now.step_duration_s),
        "speculative_acceptance": _round(now.acceptance_rate),
        "speculative_accept_length": _round(now.accept_length),
        "offload_usage": _round(now.offload_usage),
        "process_cpu_cores": _round(now.cpu_cores),
        "max_num_seqs": now.max_num_seqs,
        "max_num_batched_tokens": now.max_num_batched_tokens,
        "max_model_len": now.max_model_len,
        "block_size": now.settings.block_size,
    }


def _verdict(verdict: Verdict, view: EngineView) -> dict[str, Any]:
    snapshot = view.snapshot
    found: dict[str, Any] = {"url": view.url, "engine": snapshot.engine if snapshot else None}
    server = snapshot.server if snapshot else Server.UNKNOWN
    return verdict.to_json(server) | found


def _spread(spread: Distribution | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "count": _round(spread.count),
        "mean": _round(spread.mean),
        "p50": _bracket(spread.p50),
        "p90": _bracket(spread.p90),
        "p99": _bracket(spread.p99),
    }


def _bracket(quantile: Quantile | None) -> list[float | None] | None:
    if quantile is None:
        return None
    return [_round(quantile.low), _round(quantile.high)]


def _round(value: float | None) -> float | None:
    """Six significant digits: what a scrape can carry; nothing that JSON cannot say."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 2**53 else rounded
