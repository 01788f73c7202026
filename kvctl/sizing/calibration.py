"""Learning a machine's overheads from one run's log, and keeping them with where they came from.

Knows how a prediction and a log differ, and one small JSON file; no GPU. A calibration holds for one profile and one
engine; its weight factor for the model that ran only. Floor 1.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvctl.errors import InvalidRequest, KvctlError
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.memory import Overheads
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.server_log import ServerLog
from kvctl.units import format_bytes

_BLOCK_TOLERANCE = 1.02  # printed with three figures
_WEIGHT_TOLERANCE = 1.5  # engines count quantized and padded weights differently


@dataclass(frozen=True, slots=True)
class Calibration:
    """What one log taught: the factors, and their provenance."""

    gpu: str
    engine: str
    model: str
    source: str
    learnt_on: str
    total_bytes: int | None
    overhead_factor: float
    weight_factor: float | None
    predicted_kv_bytes: int
    observed_kv_bytes: int

    def overheads_for(self, model_id: str) -> Overheads:
        """What to use when sizing `model_id` on the same machine."""
        return Overheads(self.total_bytes, self.overhead_factor, self.weight_factor if model_id == self.model else None)


def request_of_log(request: SizeRequest, log: ServerLog) -> SizeRequest:
    """The question as the logged run would have asked it: what the log says wins over the options."""
    engine = request.engine
    if log.engine is not None and not engine.startswith(log.engine):
        engine = log.engine
    if log.version and "@" not in engine and engine == "vllm":
        engine = f"vllm@{log.version}"
    return replace(
        request,
        engine=engine,
        parallel=Parallelism(
            log.tensor_parallel or request.parallel.tensor,
            log.pipeline_parallel or request.parallel.pipeline,
            request.parallel.data,
            request.parallel.expert,
        ),
        total_bytes=log.total_bytes or request.total_bytes,
        utilization=log.utilization or request.utilization,
        kv_dtype=log.kv_dtype or request.kv_dtype,
        max_model_len=log.max_model_len or request.max_model_len,
        max_num_seqs=log.max_num_seqs or request.max_num_seqs,
        max_num_batched_tokens=log.max_num_batched_tokens or request.max_num_batched_tokens,
        block_size=log.block_size or request.block_size,
        kv_bytes=None,
        learnt=None,
    )


def calibrate(request: SizeRequest, log: ServerLog, *, source: str, learnt_on: str) -> Calibration:
    """Compare a prediction with what the run printed.

    Raises:
        InvalidRequest: no GPU profile to calibrate, or the log does not say how much KV memory there was.
    """
    if request.hardware is None:
        raise InvalidRequest("--calibrate needs the GPU that the log is from", hint="Add --gpu NAME.")
    if log.is_empty:
        raise InvalidRequest(
            f"{source} says nothing about KV memory",
            hint="Give a start-up log of vLLM, SGLang, TensorRT-LLM, llama.cpp or kvctl, or a /metrics page.",
        )
    if log.given_kv_bytes is not None:
        raise InvalidRequest(
            f"{source} is from a run whose KV memory was set outright ({format_bytes(log.given_kv_bytes)})",
            hint="It says nothing about overheads: give the log of a run without --kv-cache-memory-bytes.",
        )
    asked = request_of_log(request, log)
    answer = size_up(asked)
    if answer.budget is None or answer.pool is None or answer.weights is None:
        raise InvalidRequest("this model's memory cannot be predicted, so there is nothing to calibrate")
    _check_same_model(request, log, source, answer)
    observed = log.kv_bytes
    if observed is None and log.num_blocks is not None:
        observed = log.num_blocks * answer.pool.block_bytes
    if observed is None and log.kv_tokens is not None and answer.capacity is not None and answer.capacity.kv_tokens:
        observed = int(log.kv_tokens / answer.capacity.kv_tokens * answer.capacity.kv_bytes)
    if observed is None:
        raise InvalidRequest(f"{source} does not say how much KV memory there was", hint="Give a whole start-up log.")
    budget = answer.budget
    weights = log.weights_bytes or budget.weights_bytes
    predicted = budget.requested_bytes - budget.weights_bytes - budget.kv.value
    real = budget.requested_bytes - weights - observed
    return Calibration(
        gpu=request.hardware.id,
        engine=answer.rules.name,
        model=request.model.id,
        source=source,
        learnt_on=learnt_on,
        total_bytes=log.total_bytes,
        overhead_factor=real / predicted if predicted else 1.0,
        weight_factor=weights / answer.weights.bytes_per_gpu if log.weights_bytes else None,
        predicted_kv_bytes=budget.kv.value,
        observed_kv_bytes=observed,
    )


def _check_same_model(request: SizeRequest, log: ServerLog, source: str, answer: SizeAnswer) -> None:
    """Refuse the log of another model: its blocks or its weights are of another size."""
    assert answer.pool is not None and answer.weights is not None
    for what, logged, ours, tolerance in (
        ("KV blocks", log.block_bytes, answer.pool.block_bytes, _BLOCK_TOLERANCE),
        ("weights", log.weights_bytes, answer.weights.bytes_per_gpu, _WEIGHT_TOLERANCE),
    ):
        if logged is not None and ours and not 1 / tolerance <= logged / ours <= tolerance:
            raise InvalidRequest(
                f"{source} is from another model or setup: {what} of {format_bytes(logged)}, "
                f"those of {request.model.id} are {format_bytes(ours)}",
                hint="Name the MODEL that ran, with its --dtype, --tp and --quantization.",
            )


def calibration_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where calibrations are kept."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "kvctl" / "calibration.json"


def _read_all(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise KvctlError(f"{path} cannot be read: {error}", hint="Delete it, or calibrate again.") from error
    return stored if isinstance(stored, dict) else {}


def store_calibration(calibration: Calibration, path: Path) -> None:
    """Keep a calibration; one per profile and engine, the newest wins. A damaged store begins anew.

    The file is replaced whole, so that a run that reads it meanwhile sees the old one or the new one.

    Raises:
        KvctlError: the file cannot be written.
    """
    try:
        stored = _read_all(path)
    except KvctlError:
        stored = {}
    stored[f"{calibration.gpu}/{calibration.engine}"] = asdict(calibration)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise KvctlError(f"{path} cannot be written: {error.strerror}", hint="Set XDG_STATE_HOME.") from error


def stored_calibration(gpu: str, engine: str, path: Path) -> Calibration | None:
    """The calibration of a profile and engine, None if there is none.

    Raises:
        KvctlError: the file is damaged.
    """
    entry = _read_all(path).get(f"{gpu}/{engine}")
    if entry is None:
        return None
    try:
        return Calibration(**entry)
    except TypeError as error:
        raise KvctlError(f"{path} is damaged: {error}", hint="Delete it, or calibrate again.") from error
