"""Carry out one `kvctl size`: options become a question, the answer a page or JSON, the verdict an exit code.

Knows options and outputs; prints results on stdout only. Floor 4.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

from kvctl.errors import ConfigError, KvctlError
from kvctl.model.hardware import HardwareProfile, all_hardware, detect_hardware, find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.advice import advise
from kvctl.sizing.json_report import answer_json, choice_json, offload_json, users_json
from kvctl.sizing.offload import OffloadReport, offload_report
from kvctl.sizing.recommend import Choice, Demand, compare, recommend, seat
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.speed import SpeedModel, SpeedReport
from kvctl.sizing.users import UsersFit, users_fit
from kvctl.units import parse_bytes, parse_count

EXIT_FITS, EXIT_CANNOT_TELL, EXIT_TOO_LARGE = 0, 3, 4
AUTO_LENGTHS = ("auto", "-1")  # vLLM's ways to ask for the longest length that fits
BATCHES = (1, 4, 16, 64, 256)
_DEFAULT_PROMPT = 1024  # tokens of the prompt whose TTFT is shown when none is asked for
_DECODE_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """The command line, as text and numbers."""

    model: str
    refresh: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    gpu: str | None = None
    gpu_count: int | None = None
    utilization: float | None = None
    kv_bytes: str | None = None
    calibrate: str | None = None
    uncalibrated: bool = False
    engine: str = "kvctl"
    tensor: int | None = None
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    context_parallel: int = 1
    kv_dtype: str = "auto"
    block_size: int | None = None
    max_model_len: str | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: str | None = None
    prefix_caching: bool | None = None
    eager: bool = False
    prefix_share: float = 0.0
    users: int | None = None
    context: str | None = None
    output: str | None = None
    workload: str | None = None
    max_context: bool = False
    compare: str | None = None
    compare_kv: str | None = None
    recommend: bool = False
    as_json: bool = False
    explain: bool = False
    ascii_only: bool = False
    svg: str | None = None


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that the page and the JSON show."""

    answer: SizeAnswer
    speed: SpeedReport | None
    offload: OffloadReport | None
    users: UsersFit | None
    choices: list[Choice] = field(default_factory=list)
    recommended: Choice | None = None
    advice: list[str] = field(default_factory=list)
    extra_notes: list[str] = field(default_factory=list)


def run(options: SizeOptions) -> int:
    """Answer and print; returns the exit code.

    Raises:
        KvctlError: as `size_up`, the lookups and the options do; with --json the object is printed first.
    """
    try:
        findings = find_out(options)
    except KvctlError as error:
        if options.as_json:
            print(json.dumps(_error_object(error), indent=1))
        raise
    code = exit_code(options, findings)
    if options.as_json:
        print(json.dumps(as_object(options, findings), indent=1))
        return code
    from kvctl.cli.size_page import show  # Rich, which --json does not need

    show(options, findings)
    return code


def find_out(options: SizeOptions) -> Findings:
    """Ask everything that the options ask.

    Raises:
        KvctlError: see `run`.
    """
    _check_questions(options)
    request, notes = build_request(options)
    demand = build_demand(options, request)
    if options.max_model_len is None and demand.context_tokens is not None:
        request = replace(request, max_model_len=demand.context_tokens)
    choices = [] if options.compare is None and options.compare_kv is None else _compare(options, request, demand)
    recommended = None
    if options.recommend:
        machines = [request.hardware] if request.hardware else [p for p in all_hardware() if not p.is_cpu]
        recommended = recommend(request, demand, machines)
        if recommended is not None:
            request = recommended.request
    asked_seats = request.max_num_seqs
    request, answer = seat(request, demand)
    if request.max_num_seqs != asked_seats:
        notes.append(f"--max-num-seqs {request.max_num_seqs} is taken: the default has fewer seats than users.")
    if options.max_model_len in AUTO_LENGTHS and answer.capacity is not None and answer.capacity.max_context_tokens:
        request = replace(request, max_model_len=answer.capacity.max_context_tokens)
        answer = size_up(request)
    speed = offload = None
    if request.hardware is not None and answer.weights is not None and answer.weights.active_parameters:
        model = SpeedModel(
            request.model.shape, answer.specs, answer.weights, request.hardware, request.parallel, answer.dtype
        )
        prompt = _count(options.context) or min(_DEFAULT_PROMPT, max(1, answer.limits.max_model_len // 2))
        speed = model.report(
            prompt, BATCHES, min(_count(options.context) or _DECODE_CONTEXT, answer.limits.max_model_len)
        )
        offload = offload_report(model, prompt)
    users = None
    if options.users is not None or options.workload is not None:
        users = users_fit(
            answer, demand.users, demand.context_tokens or answer.limits.max_model_len, demand.shared_tokens
        )
    return Findings(answer, speed, offload, users, choices, recommended, advise(answer, demand, users), notes)


def _check_questions(options: SizeOptions) -> None:
    if options.users is not None and options.users < 1:
        raise ConfigError(f"--users is {options.users}", hint="Give 1 or more.")
    if options.users is not None and options.context is None and options.workload is None:
        raise ConfigError("--users needs the length of a context", hint="Add --context TOKENS or --workload NAME.")
    if options.gpu_count is not None and options.gpu_count < 1:
        raise ConfigError(f"--gpu-count is {options.gpu_count}", hint="Give 1 or more.")
    has_memory = options.gpu is not None or options.kv_bytes is not None
    if not has_memory and not options.recommend and options.compare is None:
        for given, name in (
            (options.users, "--users"),
            (options.max_context, "--max-context"),
            (options.workload, "--workload"),
            (options.compare_kv, "--compare-kv"),
            (options.calibrate, "--calibrate"),
        ):
            if given:
                raise ConfigError(f"{name} needs memory to divide", hint="Add --gpu NAME or --kv-cache-memory-bytes.")


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    number = parse_count(text)
    if number < 1:
        raise ConfigError(f"{text!r} is not a number of tokens", hint="Give 1 or more, like 4096 or 32k.")
    return number


def build_request(options: SizeOptions) -> tuple[SizeRequest, list[str]]:
    """The question, with a calibration where there is one; and notes about how it came about."""
    model = load_model(options.model, refresh=options.refresh)
    hardware: HardwareProfile | None = None
    total, found_count = None, None
    if options.gpu == "auto":
        hardware, total, found_count = detect_hardware()
    elif options.gpu is not None:
        hardware = find_hardware(options.gpu)
    count = options.gpu_count or found_count or 1
    tensor = options.tensor if options.tensor is not None else max(1, count // max(1, options.pipeline))
    request = SizeRequest(
        model=model,
        engine=options.engine,
        parallel=Parallelism(tensor, options.pipeline, options.data, options.expert),
        hardware=hardware,
        total_bytes=total if found_count else None,
        utilization=options.utilization,
        kv_bytes=None if options.kv_bytes is None else parse_bytes(options.kv_bytes),
        kv_dtype=options.kv_dtype,
        dtype=options.dtype,
        quantization=options.quantization,
        block_size=options.block_size,
        max_model_len=None if options.max_model_len in AUTO_LENGTHS else _count(options.max_model_len),
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=_count(options.max_num_batched_tokens),
        prefix_caching=options.prefix_caching,
        prefix_share=options.prefix_share,
        enforce_eager=options.eager,
        context_parallel=options.context_parallel,
    )
    if options.gpu_count is not None and options.gpu_count != request.parallel.gpus * options.data:
        raise ConfigError(
            f"--gpu-count {options.gpu_count} is not tp {tensor} x pp {options.pipeline} x dp {options.data}",
            hint="Leave --tp out, or make them agree.",
        )
    return _calibrated(options, request)


def _calibrated(options: SizeOptions, request: SizeRequest) -> tuple[SizeRequest, list[str]]:
    from kvctl.sizing.calibration import calibrate, calibration_file, store_calibration, stored_calibration

    path = calibration_file()
    if options.calibrate is not None:
        from datetime import UTC, datetime

        from kvctl.cli.size_calibrate import read_log

        today = datetime.now(UTC).date().isoformat()
        learnt = calibrate(request, read_log(options.calibrate), source=options.calibrate, learnt_on=today)
        store_calibration(learnt, path)
        times = f"{learnt.overhead_factor:.2f} times"
        note = f"Calibrated {learnt.gpu} with {learnt.engine}: overheads {times} the predicted; stored in {path}."
        return replace(request, learnt=learnt.overheads_for(request.model.id)), [note]
    if request.hardware is None or options.uncalibrated:
        return request, []
    stored = stored_calibration(request.hardware.id, request.engine.partition("@")[0], path)
    if stored is None:
        return request, []
    note = f"Calibrated on {stored.learnt_on} from {stored.source} ({stored.model}); --uncalibrated leaves it aside."
    return replace(request, learnt=stored.overheads_for(request.model.id)), [note]


def build_demand(options: SizeOptions, request: SizeRequest) -> Demand:
    """What must fit, from --users, --context and --output or from a workload's lengths."""
    if options.workload is not None:
        from kvctl.cli.size_calibrate import workload_lengths

        lengths = workload_lengths(options.workload, options.users or 1)
        return Demand(options.users or 1, lengths.context_tokens, lengths.shared_tokens)
    context, output = _count(options.context), _count(options.output) or 0
    if context is None:
        return Demand(options.users or 1, None, 0)
    return Demand(options.users or 1, context + output, int(context * request.prefix_share))


def _compare(options: SizeOptions, request: SizeRequest, demand: Demand) -> list[Choice]:
    gpus = [find_hardware(name) for name in (options.compare or "").split(",") if name.strip()]
    kv_dtypes = [name.strip() for name in (options.compare_kv or "").split(",") if name.strip()]
    if options.compare is not None and not gpus:
        raise ConfigError("--compare names no GPU", hint="Write --compare a100-80g,h100-sxm.")
    for name in kv_dtypes:
        from kvctl.model.dtypes import kv_format

        kv_format(name, "bfloat16")
    return compare(request, demand, gpus, kv_dtypes)


def exit_code(options: SizeOptions, findings: Findings) -> int:
    """0 fits or nothing was asked; 4 does not fit."""
    if findings.choices:
        return EXIT_FITS if any(choice.fits for choice in findings.choices) else EXIT_TOO_LARGE
    if options.recommend:
        return EXIT_FITS if findings.recommended is not None else EXIT_TOO_LARGE
    if findings.users is not None and not findings.users.fits:
        return EXIT_TOO_LARGE
    if options.max_context and findings.answer.capacity is not None:
        return EXIT_FITS if findings.answer.capacity.max_context_tokens > 0 else EXIT_TOO_LARGE
    return EXIT_TOO_LARGE if findings.answer.fits is False else EXIT_FITS


def as_object(options: SizeOptions, findings: Findings) -> dict[str, Any]:
    """The JSON of everything found."""
    result = answer_json(findings.answer, findings.speed, findings.advice)
    result["notes"] += findings.extra_notes
    result["users"] = users_json(findings.users)
    result["offload"] = offload_json(findings.offload)
    result["compare"] = [choice_json(choice) for choice in findings.choices]
    result["recommend"] = choice_json(findings.recommended) if findings.recommended else None
    return result


def _error_object(error: KvctlError) -> dict[str, Any]:
    names = ("model", "kv", "weights", "memory", "capacity", "speed", "users", "offload", "recommend")
    return {
        "schema_version": 1,
        **dict.fromkeys(names),
        "compare": [],
        "advice": [error.hint] if error.hint else [],
        "notes": [error.message],
        "error": {"message": error.message, "hint": error.hint, "exit_code": error.exit_code},
    }


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()
