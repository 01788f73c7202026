"""The answer as JSON, `schema_version` 1: stable names, integers for bytes, null for what was not asked.

Computes nothing. Fields may be added within a version, never renamed or removed. Floor 1.

    model     id, architecture, source (where found, how old), attention (for people), layers [{kind, count,
              window_tokens?}], parameters, max_model_len (its own)
    kv        dtype; bytes_per_token (ideal cost of one more token at long context, all GPUs), the same per_gpu;
              block_size (tokens), block_bytes_per_gpu, state_bytes_per_request (recurrent, per GPU);
              groups [{kind, layers, padding_layers, block_tokens, block_bytes_per_gpu, window_tokens}]
    weights   bytes, bytes_per_gpu (the fullest), source, format, active_parameters (used for one token)
    memory    one GPU: gpu, total_bytes, requested_bytes, weights_bytes, and {low, value, high} of activation_bytes,
              graph_bytes, other_bytes, kv_bytes; null without --gpu and --kv-cache-memory-bytes
    capacity  engine, num_blocks, usable_blocks (without the null block), kv_tokens (as the engine prints it),
              max_model_len, max_concurrency, max_context_tokens (longest single request), fits, needed_bytes,
              state_slots (requests whose state fits, where kept apart); null like memory
    speed     method, ridge_flop_per_byte, compute_format, prompt_tokens, prefill_tokens_per_s, ttft_s,
              compute_bound_batch, decode [{batch, context, tpot_s, tokens_per_s, tokens_per_s_band, bound,
              kv_read_share, flop_per_byte}]; bands are {low, value, high}; null without --gpu
    users, offload, compare, recommend    answers to those questions, else null or []
    advice, notes    lines for people
    error     only with an error: message, hint, exit_code; everything else is null
"""

from collections import Counter
from dataclasses import asdict
from typing import Any

from kvctl.sizing.memory import Range
from kvctl.sizing.offload import OffloadReport
from kvctl.sizing.recommend import Choice, obstacle, serve_command
from kvctl.sizing.request import SizeAnswer
from kvctl.sizing.speed import METHOD, Band, SpeedReport
from kvctl.sizing.users import UsersFit

SCHEMA_VERSION = 1
PROGRAMS = ("kvctl serve", "vllm serve")


def answer_json(answer: SizeAnswer, speed: SpeedReport | None, advice: list[str]) -> dict[str, Any]:
    """The whole object but for the inverse questions."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": _model(answer),
        "kv": _kv(answer),
        "weights": _weights(answer),
        "memory": _memory(answer),
        "capacity": _capacity(answer),
        "speed": speed_json(speed),
        "advice": advice,
        "notes": list(answer.notes),
    }


def _model(answer: SizeAnswer) -> dict[str, Any]:
    model = answer.request.model
    counts = Counter((layer.name, layer.window_tokens) for layer in model.shape.layers)
    return {
        "id": model.id,
        "architecture": model.shape.architecture,
        "source": model.source,
        "attention": model.shape.attention,
        "layers": [
            {"kind": kind, "count": count, **({"window_tokens": window} if window else {})}
            for (kind, window), count in counts.items()
        ],
        "parameters": answer.weights.num_parameters if answer.weights and answer.weights.num_parameters else None,
        "max_model_len": model.shape.max_model_len,
    }


def _kv(answer: SizeAnswer) -> dict[str, Any]:
    pool = answer.pool
    return {
        "dtype": answer.kv_dtype if answer.kv_dtype != "auto" else answer.dtype,
        "bytes_per_token": answer.bytes_per_token,
        "bytes_per_token_per_gpu": answer.bytes_per_token_per_gpu,
        "block_size": pool.block_tokens if pool else None,
        "block_bytes_per_gpu": pool.block_bytes if pool else None,
        "state_bytes_per_request": answer.state_bytes,
        "groups": [
            {
                "kind": group.kind.value,
                "layers": len(group.layer_indices),
                "padding_layers": group.padding_layers,
                "block_tokens": group.block_tokens,
                "block_bytes_per_gpu": group.page_bytes,
                "window_tokens": group.window_tokens,
            }
            for group in (pool.groups if pool else ())
        ],
    }


def _weights(answer: SizeAnswer) -> dict[str, Any] | None:
    weights = answer.weights
    if weights is None:
        return None
    return {
        "bytes": weights.total_bytes,
        "bytes_per_gpu": weights.bytes_per_gpu,
        "source": weights.source,
        "format": weights.format_name,
        "active_parameters": weights.active_parameters or None,
    }


def _range(amount: Range) -> dict[str, int]:
    return {"low": amount.low, "value": amount.value, "high": amount.high}


def _memory(answer: SizeAnswer) -> dict[str, Any] | None:
    budget, request = answer.budget, answer.request
    if budget is None and request.kv_bytes is None:
        return None
    kv = budget.kv if budget is not None else None
    if request.kv_bytes is not None:
        kv = Range(request.kv_bytes, request.kv_bytes, request.kv_bytes)
    return {
        "gpu": request.hardware.id if request.hardware else None,
        "total_bytes": budget.total_bytes if budget else None,
        "requested_bytes": budget.requested_bytes if budget else None,
        "weights_bytes": budget.weights_bytes if budget else None,
        "activation_bytes": _range(budget.activation) if budget else None,
        "graph_bytes": _range(budget.graphs) if budget else None,
        "other_bytes": _range(budget.other) if budget else None,
        "kv_bytes": _range(kv) if kv is not None else None,
    }


def _capacity(answer: SizeAnswer) -> dict[str, Any] | None:
    capacity = answer.capacity
    if capacity is None:
        return None
    return {
        "engine": answer.rules.label,
        "num_blocks": capacity.num_blocks,
        "usable_blocks": capacity.usable_blocks,
        "kv_tokens": capacity.kv_tokens,
        "max_model_len": capacity.max_model_len,
        "max_concurrency": capacity.max_concurrency,
        "max_context_tokens": capacity.max_context_tokens,
        "fits": capacity.fits,
        "needed_bytes": capacity.needed_bytes,
        "state_slots": capacity.state_slots,
    }


def _band(band: Band) -> dict[str, float]:
    return asdict(band)


def speed_json(speed: SpeedReport | None) -> dict[str, Any] | None:
    """Speeds with their bands; null without a GPU."""
    if speed is None:
        return None
    return {
        "method": METHOD,
        "ridge_flop_per_byte": speed.ridge_flop_per_byte,
        "compute_format": speed.compute_format,
        "prompt_tokens": speed.prompt_tokens,
        "prefill_tokens_per_s": _band(speed.prefill_tokens_per_s),
        "ttft_s": _band(speed.ttft_s),
        "compute_bound_batch": speed.compute_bound_batch,
        "decode": [
            {
                "batch": row.batch,
                "context": row.context,
                "tpot_s": _band(row.tpot_s),
                "tokens_per_s": row.tokens_per_s.value,
                "tokens_per_s_band": _band(row.tokens_per_s),
                "bound": row.bound,
                "kv_read_share": row.kv_read_share,
                "flop_per_byte": row.intensity,
            }
            for row in speed.decode
        ],
    }


def users_json(fit: UsersFit | None) -> dict[str, Any] | None:
    """The answer to --users."""
    return None if fit is None else asdict(fit)


def offload_json(report: OffloadReport | None) -> dict[str, Any] | None:
    """The answer about host memory and NVMe."""
    return None if report is None else asdict(report)


def choice_json(choice: Choice) -> dict[str, Any]:
    """One row of a comparison, or the recommendation."""
    answer = choice.answer
    hardware = choice.request.hardware
    return {
        "label": choice.label,
        "gpu": hardware.id if hardware else None,
        "gpus": choice.request.parallel.gpus * choice.request.parallel.data,
        "kv_dtype": choice.request.kv_dtype,
        "fits": choice.fits,
        "capacity": _capacity(answer) if answer else None,
        "users": users_json(choice.users),
        "usd_per_hour": choice.usd_per_hour,
        "problem": choice.problem,
        "commands": [serve_command(choice, p) for p in PROGRAMS if choice.fits and obstacle(choice, p) is None],
    }
