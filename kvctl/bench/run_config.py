"""What one run does, as frozen values: the load, the request, the limits. Built by `cli.bench`, read by the runner.

Knows nothing of sockets or of how results look. Floor 3.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvctl.errors import ConfigError
from kvctl.metrics.summary import Slo
from kvctl.workload.arrivals import ArrivalSpec, Process

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
LATE_S = 0.005  # sent more than this after it was due: late


@dataclass(frozen=True)
class LoadConfig:
    """How requests are issued. `concurrency`: closed loop; `arrivals` or `replay`: open, `max_in_flight` caps it."""

    concurrency: int | None = None
    arrivals: ArrivalSpec | None = None
    replay: bool = False  # the workload says when requests are due
    process: Process = "poisson"  # of rates that a search sets
    burstiness: float = 1.0  # the same
    max_in_flight: int | None = None
    duration_s: float | None = None
    num_requests: int | None = None
    is_finite: bool = False  # the workload ends by itself
    warmup_requests: int = 0
    ramp_s: float | None = None  # closed loop: starts are spread over this; None: 4 ms per stream, at most 2 s
    drain_timeout_s: float = 120.0
    max_error_rate: float | None = None
    retry_wait_max_s: float = 10.0  # a Retry-After is kept up to this
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.concurrency is not None) + (self.arrivals is not None) + self.replay != 1:
            raise ConfigError("a load is either closed (--concurrency) or open (--rate), and one of them")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency {self.concurrency} is no load", hint="Give --concurrency at least 1.")
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ConfigError(f"--max-in-flight {self.max_in_flight} sends nothing", hint="Give at least 1.")
        if self.duration_s is None and self.num_requests is None and not self.is_finite:
            raise ConfigError("the run has no end", hint="Give --duration or --requests.")
        if (self.duration_s is not None and self.duration_s <= 0) or (
            self.num_requests is not None and self.num_requests < 1
        ):
            raise ConfigError("the run would end before it begins", hint="Give --duration or --requests above 0.")

    @property
    def is_open(self) -> bool:
        """Whether requests are due by a schedule."""
        return self.concurrency is None

    @property
    def effective_ramp_s(self) -> float:
        """Over how long the streams of a closed loop start."""
        if self.concurrency is None:
            return 0.0
        return min(2.0, 0.004 * self.concurrency) if self.ramp_s is None else self.ramp_s


@dataclass(frozen=True)
class RequestConfig:
    """What every request's body says, besides the prompt."""

    endpoint: Endpoint = "completions"
    model: str | None = None
    include_usage: bool = True
    continuous_usage: bool = False
    ignore_eos: bool = True
    temperature: float | None = 0.0
    limit_field: str = "max_tokens"  # some servers want max_completion_tokens for chat
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """The fields that do not depend on the prompt."""
        body: dict[str, Any] = {"stream": True}
        if self.model is not None:
            body["model"] = self.model
        if self.include_usage:
            body["stream_options"] = {"include_usage": True}
            if self.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.temperature is not None:
            body["temperature"] = self.temperature
        return body | dict(self.extra_body)


@dataclass(frozen=True)
class ReportConfig:
    """What is kept and counted."""

    slo: Slo | None = None
    keep_records: bool = False
    late_s: float = LATE_S


def load_as_json(load: LoadConfig) -> dict[str, Any]:
    """The load as the result tells it."""
    values = asdict(load)
    values["arrivals"] = None if load.arrivals is None else load.arrivals.as_json()
    values["ramp_s"] = load.effective_ramp_s
    del values["process"], values["burstiness"]  # told by `arrivals`
    return values
