"""One measurement from beginning to end: preflight, calibration, warm-up, load, server's readings, result.

`prepare` asks the server once; `measure` may then run several loads (sweeps and searches do). Prints nothing: progress
goes to a `Progress`. Floor 3.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from kvctl import __version__
from kvctl.bench.calibration import calibrate
from kvctl.bench.client import ClientConfig
from kvctl.bench.collector import Measurements
from kvctl.bench.load_process import LoadJob, Watch, run_aside, run_load
from kvctl.bench.preflight import Preflight, PreflightClient
from kvctl.bench.result import build_result, build_summary
from kvctl.bench.roofline import RooflineConfig, predict
from kvctl.bench.run_config import PATHS, LoadConfig, ReportConfig, RequestConfig, load_as_json
from kvctl.bench.server_monitor import MonitorConfig, ServerMonitor
from kvctl.bench.server_report import build_server_report
from kvctl.bench.verdict import Calibration, judge
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.errors import ConfigError
from kvctl.workload.datasets import TraceEntry

_MAX_CALIBRATION_STREAMS = 512
_OPEN_LOOP_CALIBRATION_STREAMS = 64  # where no cap says how many streams there may be
_LENGTH_TOLERANCE = 0.01
_CACHED_WORTH_SAYING = 0.01


@dataclass(frozen=True)
class BenchConfig:
    """One run, as asked for."""

    url: str
    load: LoadConfig
    workload: WorkloadChoice
    request: RequestConfig = field(default_factory=RequestConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 600.0
    keep_alive: bool = True
    verify_tls: bool = True
    num_workers: int = 1
    calibrates: bool = True
    metrics_url: str | None = None  # None: /metrics of the server
    scrapes: bool = True
    roofline: RooflineConfig | None = None


class Progress(Protocol):
    """Who is told what happens."""

    def say(self, text: str) -> None:
        """Something began or was found out."""

    def watch(self, load: LoadConfig) -> Watch | None:
        """What is to run beside a load, on its loop; None: nothing."""


@dataclass(frozen=True)
class Prepared:
    """A server that was found fit to be measured, and this client's calibration."""

    preflight: Preflight
    workload: WorkloadChoice
    calibration: Calibration | None
    notes: tuple[str, ...]


def prepare(config: BenchConfig, progress: Progress) -> Prepared:
    """Ask the server what it is, then calibrate this client.

    Raises:
        ServerUnreachable: no server, or none that is OpenAI-compatible.
        ModelNotFound: it has no such model.
        ConfigError: the workload cannot fit the model.
    """
    progress.say(f"asking {config.url}")
    with PreflightClient(
        config.url, config.headers, verify_tls=config.verify_tls, timeout_s=config.timeout_s, say=progress.say
    ) as client:
        preflight = client.run(config.request, prompt_tokens=config.workload.usual_prompt_tokens)
    workload, notes = fit_to_model(config.workload, preflight.max_model_len)
    dataset, wanted = config.workload.dataset, config.load.num_requests
    if dataset is not None and wanted is not None and dataset.num_requests < wanted:
        notes = (*notes, f"{dataset.path} holds {dataset.num_requests} requests, fewer than the {wanted} asked for")
    for note in (*preflight.notes, *notes):
        progress.say(note)
    calibration = None
    if config.calibrates:
        progress.say("calibrating this client against a scripted server")
        calibration = calibrate(_calibration_streams(config.load), num_workers=config.num_workers)
    return Prepared(preflight, workload, calibration, (*preflight.notes, *notes))


def _calibration_streams(load: LoadConfig) -> int:
    streams = load.concurrency or load.max_in_flight or _OPEN_LOOP_CALIBRATION_STREAMS
    return min(streams, _MAX_CALIBRATION_STREAMS)


def fit_to_model(workload: WorkloadChoice, max_model_len: int | None) -> tuple[WorkloadChoice, tuple[str, ...]]:
    """Cut a profile's lengths to what the model can hold, answers first to no less than half of the room.

    A trace is sent as it is: how much of it the server will refuse is a note. What the turns of a session add to one
    another is not known beforehand and not counted.

    Raises:
        ConfigError: not even the shortest request fits.
    """
    profile = workload.profile
    if max_model_len is None:
        return workload, ()
    if profile is None:
        return workload, _too_long(workload, max_model_len)
    classes, notes = [], []
    for kind in profile.classes:
        room = max_model_len - kind.prefix_tokens
        shortest = kind.input_tokens.low + kind.output_tokens.low
        if shortest > room:
            raise ConfigError(
                f"class {kind.name!r} asks for at least {kind.prefix_tokens + kind.input_tokens.low} + "
                f"{kind.output_tokens.low} tokens, the model takes {max_model_len}",
                hint="Give a smaller --input-tokens or --output-tokens.",
            )
        if kind.input_tokens.high + kind.output_tokens.high > room:
            notes.append(f"class {kind.name!r}: lengths are cut to the model's {max_model_len} tokens")
            output = min(kind.output_tokens.high, max(kind.output_tokens.low, room // 2), room - kind.input_tokens.low)
            kind = replace(
                kind,
                input_tokens=replace(kind.input_tokens, high=min(kind.input_tokens.high, room - output)),
                output_tokens=replace(kind.output_tokens, high=output),
            )
        classes.append(kind)
    return replace(workload, profile=replace(profile, classes=tuple(classes))), tuple(notes)


def _too_long(workload: WorkloadChoice, max_model_len: int) -> tuple[str, ...]:
    entries = [] if workload.dataset is None else workload.dataset.entries
    lengths = [entry.input_tokens + entry.output_tokens for entry in entries if isinstance(entry, TraceEntry)]
    num_over = sum(length > max_model_len for length in lengths)
    if not num_over:
        return ()
    return (
        f"{num_over} of {len(lengths)} requests are longer than the model's {max_model_len} tokens: it refuses them",
    )


def measure(config: BenchConfig, prepared: Prepared, progress: Progress) -> tuple[dict[str, Any], Measurements]:
    """Warm up, run the load, and build the result.

    Raises:
        KvctlError: the load could not be run at all; failed requests are in the result.
    """
    job = LoadJob(
        client=ClientConfig(
            url=config.url,
            path=PATHS[prepared.preflight.request.endpoint],
            headers=config.headers,
            timeout_s=config.timeout_s,
            keep_alive=config.keep_alive,
            verify_tls=config.verify_tls,
        ),
        load=config.load,
        request=prepared.preflight.request,
        workload=prepared.workload,
        rate=prepared.preflight.rate,
        id_prefix=f"kvctl-bench-{config.load.seed}",
        keep_times=config.report.keep_records,
    )
    if config.load.warmup_requests:
        progress.say(f"warming up with {config.load.warmup_requests} requests")
        _warm_up(job, config.load)
    monitor = None
    if config.scrapes:
        interval_s = 1.0 if config.load.duration_s is None else config.load.duration_s / 120
        monitor = ServerMonitor(
            MonitorConfig(
                url=config.metrics_url or f"{config.url.rstrip('/')}/metrics",
                headers=config.headers,
                interval_s=min(max(interval_s, 0.25), 5.0),
                verify_tls=config.verify_tls,
            )
        )
    if config.num_workers > 1:  # they have no live view: each is a process without a terminal
        progress.say(f"running the load in {config.num_workers} processes; the figures come at its end")
    try:
        measured = run_load(job, num_workers=config.num_workers, watch=progress.watch(config.load))
    finally:
        readings, server_kind = ([], None) if monitor is None else monitor.stop()
    summary, _, latencies = build_summary(measured, config.load, config.report)
    client = judge(
        measured,
        summary,
        config.load,
        config.report,
        prepared.calibration,
        num_workers=config.num_workers,
        users_think=prepared.workload.has_pauses,
    )
    issue_end_s = measured.issue_end_s or measured.end_s
    server = build_server_report(readings, server_kind, measured.start_s, issue_end_s, measured.end_s)
    if config.roofline is not None:
        server = (server or {"kind": None}) | {
            "roofline": predict(config.roofline, prepared.preflight.request.model, summary)
        }
    result = build_result(
        _config_as_json(config, prepared, summary),
        summary,
        client,
        server,
        measured,
        latencies,
        with_records=config.report.keep_records,
    )
    return result, measured


def _warm_up(job: LoadJob, load: LoadConfig) -> None:
    streams = min(load.concurrency or load.max_in_flight or 8, load.warmup_requests)
    warm = LoadConfig(
        concurrency=streams,
        num_requests=load.warmup_requests,
        seed=load.seed + 1_000_003,  # other prompts than those measured
    )
    run_aside(replace(job, load=warm, workload=job.workload.for_warmup(), id_prefix=f"{job.id_prefix}-warmup"))


def _config_as_json(config: BenchConfig, prepared: Prepared, summary: Mapping[str, Any]) -> dict[str, Any]:
    request = prepared.preflight.request
    notes = list(prepared.notes)
    exact = summary["input_tokens"]["exact_share"]
    for what, name, of, told in (
        ("prompts", "input_tokens", "mean_where_asked", f" ({exact or 0:.0%} exact)"),
        ("answers", "output_tokens", "mean", ""),
    ):
        mean, asked = summary[name][of], summary[name]["asked_mean"]
        if mean and asked and abs(mean / asked - 1) > _LENGTH_TOLERANCE:
            notes.append(f"{what} had {mean:.4g} tokens on average where {asked:.4g} were asked for{told}")
    cached = summary["input_tokens"]["cached_share"]
    if cached is not None and cached >= _CACHED_WORTH_SAYING:
        notes.append(f"{cached:.0%} of the prompt tokens were cached, says usage: TTFT is that of a warm cache")
    return {
        "kvctl_version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": config.url,
        "endpoint": PATHS[request.endpoint],
        "model": request.model,
        "server_header": prepared.preflight.server or None,
        "max_model_len": prepared.preflight.max_model_len,
        "round_trip_ms": round(prepared.preflight.round_trip_s * 1e3, 3),
        "load": load_as_json(config.load),
        "workload": prepared.workload.as_json(),
        "token_rate": asdict(prepared.preflight.rate),
        "request": request.options(),
        "slo": None if config.report.slo is None else str(config.report.slo),
        "keep_alive": config.keep_alive,
        "workers": config.num_workers,
        "notes": notes,
    }
