"""Turns what a user wrote into a `BenchConfig`: every rule about options that exclude or need one another is here.

Reads files (datasets, profiles) and no environment; `cli.bench` hands the API key over. Floor 3.
"""

import json
import math
import secrets
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from kvctl.bench.roofline import RooflineConfig
from kvctl.bench.run_config import Endpoint, LoadConfig, ReportConfig, RequestConfig
from kvctl.bench.runner import BenchConfig
from kvctl.bench.workload_choice import WorkloadChoice
from kvctl.errors import ConfigError
from kvctl.metrics.summary import Slo
from kvctl.units import parse_seconds
from kvctl.workload.arrivals import ArrivalSpec, Process
from kvctl.workload.datasets import load_dataset
from kvctl.workload.lengths import LengthSpec
from kvctl.workload.workload_profile import WorkloadClass, WorkloadProfile, load_profile

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_DURATION_S = 30.0
DEFAULT_SEARCH_DURATION_S = 10.0
DEFAULT_CONCURRENCY = 16
_INPUT_TOKENS, _OUTPUT_TOKENS = "512", "128"
_PROCESSES = ("constant", "poisson", "gamma")


@dataclass(frozen=True)
class BenchOptions:
    """The options as written; None or empty: not given."""

    url: str | None = None
    model: str | None = None
    endpoint: str = "completions"
    api_key: str | None = None
    header: list[str] = field(default_factory=list)
    insecure: bool = False
    timeout: str = "600s"
    new_connections: bool = False
    concurrency: int | None = None
    rate: str | None = None
    arrivals: str = "poisson"
    burstiness: float = 1.0
    max_in_flight: int | None = None
    duration: str | None = None
    requests: int | None = None
    warmup: int = 0
    ramp: str | None = None
    seed: int | None = None
    workers: int = 1
    workload: str | None = None
    input_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: str | None = None
    turns: str | None = None
    think: str = "0s"
    dataset: Path | None = None
    dataset_format: str = "auto"
    speedup: float | None = None
    cache_bust: bool = False
    respect_eos: bool = False
    temperature: float | None = 0.0
    extra_body: str | None = None
    continuous_usage: bool = False
    slo: str | None = None
    max_error_rate: float = 0.5
    no_calibrate: bool = False
    metrics_url: str | None = None
    no_metrics: bool = False
    gpu: str | None = None
    gpu_model: str | None = None
    num_gpus: int = 1
    records: bool = False
    is_search: bool = False  # a sweep or a search sets the load itself


def make_config(options: BenchOptions) -> BenchConfig:
    """Check the options against one another and build the configuration.

    Raises:
        ConfigError: an impossible value or combination, a broken dataset or profile.
    """
    workload = _workload(options)
    return BenchConfig(
        url=normal_url(options.url or DEFAULT_URL),
        load=_load(options, workload),
        workload=workload,
        request=_request(options),
        report=ReportConfig(Slo.parse(options.slo) if options.slo else None, options.records),
        headers=_headers(options),
        timeout_s=_above_zero(options.timeout, "--timeout"),
        keep_alive=not options.new_connections,
        verify_tls=not options.insecure,
        num_workers=_count(options.workers, "--workers"),
        calibrates=not options.no_calibrate,
        metrics_url=options.metrics_url,
        scrapes=not options.no_metrics,
        roofline=None if options.gpu is None else RooflineConfig(options.gpu, options.gpu_model, options.num_gpus),
    )


def normal_url(url: str) -> str:
    """'host:port' as a full address; a path that ends in /v1 without it, and without a user's name and password.

    Raises:
        ConfigError: no address.
    """
    if "://" not in url:
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{url!r} has no valid port", hint="Write it like http://127.0.0.1:8000.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{url!r} is not a server's address", hint="Write it like http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def _load(options: BenchOptions, workload: WorkloadChoice) -> LoadConfig:
    if options.concurrency is not None and options.rate is not None:
        raise ConfigError(
            "--concurrency and --rate are two different loads",
            hint="For an open loop that may not exceed N in flight: --rate R --max-in-flight N.",
        )
    if options.max_in_flight is not None and options.concurrency is not None:
        raise ConfigError("--max-in-flight is for an open loop", hint="In a closed loop --concurrency is the cap.")
    if options.is_search and options.concurrency is not None:
        raise ConfigError("a search sets the load itself: --concurrency says nothing", hint="Leave --concurrency out.")
    arrivals, replay, concurrency = None, False, options.concurrency
    if options.arrivals not in _PROCESSES:
        raise ConfigError(f"unknown arrivals {options.arrivals!r}", hint=f"One of: {', '.join(_PROCESSES)}.")
    process = cast(Process, "gamma" if options.burstiness != 1.0 else options.arrivals)
    if options.rate is not None:
        arrivals = ArrivalSpec.parse(options.rate, process, options.burstiness)
    elif concurrency is None and workload.is_timed:
        replay = True
    elif concurrency is None:
        concurrency = DEFAULT_CONCURRENCY
    duration_s = None if options.duration is None else _above_zero(options.duration, "--duration")
    if duration_s is None and options.requests is None and not workload.is_finite:
        duration_s = DEFAULT_SEARCH_DURATION_S if options.is_search else DEFAULT_DURATION_S
        if arrivals is not None and math.isfinite(arrivals.end_s):
            duration_s = arrivals.end_s
    if not 0 <= options.max_error_rate <= 1:
        raise ConfigError(f"--max-error-rate {options.max_error_rate:g} is no share", hint="Give 0 to 1.")
    if options.warmup < 0:
        raise ConfigError(f"--warmup {options.warmup} is no number of requests")
    return LoadConfig(
        concurrency=concurrency,
        arrivals=arrivals,
        replay=replay,
        max_in_flight=options.max_in_flight,
        duration_s=duration_s,
        num_requests=options.requests,
        process=process,
        burstiness=options.burstiness,
        is_finite=workload.is_finite,
        warmup_requests=options.warmup,
        ramp_s=None if options.ramp is None else parse_seconds(options.ramp),
        max_error_rate=options.max_error_rate,
        seed=secrets.randbelow(1_000_000) if options.seed is None else options.seed,
    )


def _workload(options: BenchOptions) -> WorkloadChoice:
    shape = (options.input_tokens, options.shared_prefix, options.turns, options.output_tokens)
    # --output-tokens may go with a dataset: it is the length of answers where the file tells none
    has_lengths = any(value is not None for value in (shape[:3] if options.dataset is not None else shape))
    if (options.workload is not None) + (options.dataset is not None) + has_lengths > 1:
        raise ConfigError(
            "--workload, --dataset and token lengths say the same thing in different ways",
            hint="Give one of: --workload NAME, --dataset FILE, --input-tokens/--output-tokens.",
        )
    if options.speedup is not None and options.dataset is None:
        raise ConfigError("--speedup needs a trace", hint="Give --dataset FILE with times in it.")
    if options.dataset is not None:
        output = LengthSpec.parse(options.output_tokens or _OUTPUT_TOKENS)
        dataset = load_dataset(
            options.dataset,
            options.dataset_format,
            default_output_tokens=round(output.mean),
            max_entries=options.requests,
        )
        if options.speedup is not None:
            dataset = dataset.sped_up(options.speedup)
        return WorkloadChoice(dataset=dataset, cache_bust=options.cache_bust)
    if options.workload is not None:
        return WorkloadChoice(profile=load_profile(options.workload), cache_bust=options.cache_bust)
    groups, prefix_tokens = _shared_prefix(options.shared_prefix)
    workload_class = WorkloadClass(
        name="random",
        input_tokens=LengthSpec.parse(options.input_tokens or _INPUT_TOKENS),
        output_tokens=LengthSpec.parse(options.output_tokens or _OUTPUT_TOKENS),
        prefix_groups=groups,
        prefix_tokens=prefix_tokens,
        turns=LengthSpec.parse(options.turns or "1"),
        think_s=parse_seconds(options.think),
    )
    return WorkloadChoice(profile=WorkloadProfile("random", (workload_class,)), cache_bust=options.cache_bust)


def _shared_prefix(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 0
    groups, separator, tokens = text.lower().partition("x")
    try:
        if separator:
            result = int(groups), int(tokens)
        else:
            result = 1, int(groups)
    except ValueError:
        result = 0, 0
    if result[0] < 1 or result[1] < 1:
        raise ConfigError(
            f"{text!r} is no shared prefix", hint="Write 512 (tokens) or 8x512 (8 groups of 512 tokens each)."
        )
    return result


def _request(options: BenchOptions) -> RequestConfig:
    if options.endpoint not in ("completions", "chat"):
        raise ConfigError(f"unknown endpoint {options.endpoint!r}", hint="One of: completions, chat.")
    extra: Any = {}
    if options.extra_body is not None:
        try:
            extra = json.loads(options.extra_body)
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise ConfigError("--extra-body is not a JSON object", hint="""Write --extra-body '{"top_p": 0.9}'.""")
    return RequestConfig(
        endpoint=cast(Endpoint, options.endpoint),
        model=options.model,
        continuous_usage=options.continuous_usage,
        ignore_eos=not options.respect_eos,
        temperature=options.temperature,
        extra_body=extra,
    )


def _headers(options: BenchOptions) -> dict[str, str]:
    headers = {}
    for text in options.header:
        name, separator, value = text.partition(":")
        if not separator or not name.strip() or "\n" in text or "\r" in text or not text.isascii():
            raise ConfigError(f"{text!r} is no header", hint="Write --header 'Name: value'.")
        headers[name.strip()] = value.strip()
    user, separator, _ = urlsplit(options.url or "").netloc.rpartition("@")
    if separator:
        headers["Authorization"] = f"Basic {b64encode(unquote(user).encode()).decode()}"
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    return headers


def _above_zero(text: str, name: str) -> float:
    value = parse_seconds(text)
    if not value > 0:
        raise ConfigError(f"{name} {text} is no time at all", hint=f"Give {name} above 0.")
    return value


def _count(value: int, name: str) -> int:
    if value < 1:
        raise ConfigError(f"{name} {value} is none", hint=f"Give {name} 1 or more.")
    return value
