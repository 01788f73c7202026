"""METRICS: every family that `kvctl serve` exposes, in one table. README's table is made from it.

Families named `vllm:` have vLLM's names, labels and buckets, so that dashboards, routers and autoscalers that read
vLLM read kvctl; those named `kvctl:` are what operators miss there. Knows no values and no prometheus_client.
Every family carries the labels of `COMMON_LABELS` and then its own. Floor 0.

Source of the `vllm:` names, labels and buckets: vLLM 0.33 /metrics (2026-11), compared in `tests/metrics` with a
page that a vLLM server printed.
"""

from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Final

COMMON_LABELS: Final = ("model_name", "engine")


class MetricKind(Enum):
    """What a family counts; the value is Prometheus' word."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricDef:
    """One family.

    `label_values` has the values of the first own label that are exposed as 0 before anything happened, so that a
    rate over them works from the start. `buckets` are upper bounds without infinity; None on a histogram stands for
    token counts up to the model's length (`token_buckets`). `origin` says what a sample is made of.
    """

    name: str
    kind: MetricKind
    help: str
    origin: str
    labels: tuple[str, ...] = ()
    label_values: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None

    @property
    def exposed_name(self) -> str:
        """The name of its samples on the page: counters end in _total there."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def token_buckets(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len` tokens."""
    bounds: list[float] = []
    for power in count():
        for digit in (1, 2, 5):
            bound = digit * 10**power
            if bound > max_model_len:
                return tuple(bounds)
            bounds.append(float(bound))
    raise AssertionError  # count() has no end


ITERATION_TOKEN_BUCKETS: Final = (1.0, *(float(1 << power) for power in range(3, 15)))
TTFT_BUCKETS_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_LATENCY_BUCKETS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BUCKETS_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)


def _counter(name: str, help_: str, origin: str, label: str = "", values: tuple[str, ...] = ()) -> MetricDef:
    return MetricDef(name, MetricKind.COUNTER, help_, origin, (label,) if label else (), values)


def _gauge(name: str, help_: str, origin: str, *labels: str, values: tuple[str, ...] = ()) -> MetricDef:
    return MetricDef(name, MetricKind.GAUGE, help_, origin, labels, values)


def _histogram(name: str, help_: str, origin: str, buckets: tuple[float, ...] | None) -> MetricDef:
    return MetricDef(name, MetricKind.HISTOGRAM, help_, origin, buckets=buckets)


_STEP = "engine, each step"
_FIRST = "API process, at a request's first token"
_END = "API process, at a request's end"
_START = "engine, at start"

CACHE_CONFIG_LABELS: Final = (
    "block_size",
    "num_gpu_blocks",
    "cache_dtype",
    "enable_prefix_caching",
    "kv_cache_size_tokens",
    "kv_cache_max_concurrency",
    "kv_cache_memory_bytes",
)
BACKEND_LABELS: Final = (
    "version",
    "architecture",
    "device",
    "dtype",
    "attention_backend",
    "linear_backend",
    "num_threads",
)

_DEFINITIONS: Final = (
    # ---- state ----
    _gauge("vllm:num_requests_running", "Requests in the running batch.", _STEP),
    _gauge("vllm:num_requests_waiting", "Requests waiting to be admitted.", _STEP),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests, by vLLM's two reasons. All waiting here is for capacity.",
        _STEP,
        "reason",
        values=("capacity", "deferred"),
    ),
    _gauge(
        "kvctl:num_requests_waiting_by_reason",
        "Waiting requests, by what the head of the queue is short of.",
        _STEP,
        "reason",
        values=("kv_blocks", "max_num_seqs", "token_budget", "preemption", "new"),
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that running requests hold, 0 to 1.", _STEP),
    _gauge("kvctl:kv_cache_bytes", "Bytes of the KV cache.", _START),
    _gauge("kvctl:kv_cache_size_tokens", "Tokens that the KV cache holds, counted as at start.", _START),
    _gauge("kvctl:kv_cache_used_bytes", "Bytes of the KV blocks that running requests hold.", _STEP),
    _gauge(
        "vllm:cache_config_info", "The KV cache's configuration, as labels; always 1.", _START, *CACHE_CONFIG_LABELS
    ),
    _gauge(
        "kvctl:backend_info", "What computes: device, dtype, backends, as labels; always 1.", _START, *BACKEND_LABELS
    ),
    _gauge("kvctl:weight_bytes", "Bytes of the model's weights.", _START),
    _gauge("kvctl:max_num_seqs", "Most requests running at once.", _START),
    _gauge("kvctl:max_num_batched_tokens", "Most tokens computed in one step.", _START),
    _gauge("kvctl:max_model_len", "Most tokens of one request, prompt and output.", _START),
    # ---- prefix cache ----
    _counter(
        "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "engine, at a first admission"
    ),
    _counter("vllm:prefix_cache_hits", "Of those, tokens found.", "engine, at a first admission"),
    _counter(
        "kvctl:prefix_cache_miss_tokens",
        "Of those, tokens not found, by reason.",
        "engine, at a first admission",
        "reason",
        ("new", "evicted", "partial_block", "prompt_logprobs", "disabled"),
    ),
    _counter("vllm:num_preemptions", "Running requests put back in the queue for want of blocks.", _STEP),
    _counter("kvctl:recomputed_tokens", "Tokens computed again after a preemption; never prefix-cache hits.", _STEP),
    # ---- tokens ----
    _counter("vllm:prompt_tokens", "Prompt tokens processed, found or computed.", _FIRST),
    _counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens, by where their KV came from.",
        _FIRST,
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    _counter("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", _FIRST),
    _counter(
        "vllm:prompt_tokens_cached_by_source",
        "Of those, by the memory that held them. Here always the device.",
        _FIRST,
        "source",
        ("device",),
    ),
    _counter("vllm:generation_tokens", "Generated tokens.", "API process, each step"),
    _counter(
        "kvctl:scheduled_tokens",
        "Tokens computed, by what they belong to (recomputed output counts as decode).",
        _STEP,
        "phase",
        ("prefill", "decode"),
    ),
    # ---- requests ----
    _counter("kvctl:requests_accepted", "Requests (each child of n) given to the engine.", "API process, on arrival"),
    _counter(
        "vllm:request_success",
        "Requests that have ended, by how.",
        _END,
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
    ),
    _counter(
        "vllm:admission_rejections",
        "Requests refused before they reached the engine.",
        "API process, on arrival",
        "reason",
        ("max_num_queued_reqs", "max_num_queued_tokens"),
    ),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _END, None),
    _histogram("vllm:request_generation_tokens", "Generated tokens of a request.", _END, None),
    _histogram(
        "vllm:request_max_num_generation_tokens", "Generated tokens of the longest child of a request.", _END, None
    ),
    _histogram("vllm:request_params_max_tokens", "The max_tokens that a request asked for.", _END, None),
    _histogram(
        "vllm:request_prefill_kv_computed_tokens", "Prompt tokens of a request that had to be computed.", _END, None
    ),
    _histogram("vllm:request_params_n", "The n that a request asked for.", _END, (1.0, 2.0, 5.0, 10.0, 20.0)),
    _histogram(
        "vllm:request_num_preemptions",
        "How often a request was preempted.",
        "engine, at a request's own end",
        (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    ),
    # ---- latency: metrics/timeline.py defines the spans ----
    _histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _FIRST, TTFT_BUCKETS_S),
    _histogram(
        "vllm:inter_token_latency_seconds",
        "Gap between two deliveries of tokens of a request.",
        "API process, each step",
        TOKEN_LATENCY_BUCKETS_S,
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token after the first, of a request.",
        _END,
        TOKEN_LATENCY_BUCKETS_S,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _END, REQUEST_LATENCY_BUCKETS_S),
    _histogram("vllm:request_queue_time_seconds", "Arrival to first admission.", _END, REQUEST_LATENCY_BUCKETS_S),
    _histogram("vllm:request_prefill_time_seconds", "First admission to first token.", _END, REQUEST_LATENCY_BUCKETS_S),
    _histogram("vllm:request_decode_time_seconds", "First token to last token.", _END, REQUEST_LATENCY_BUCKETS_S),
    _histogram(
        "vllm:request_inference_time_seconds", "First admission to last token.", _END, REQUEST_LATENCY_BUCKETS_S
    ),
    # ---- steps ----
    _histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP, ITERATION_TOKEN_BUCKETS),
    _histogram("kvctl:step_duration_seconds", "A whole step: schedule, execute, update.", _STEP, STEP_BUCKETS_S),
    _histogram("kvctl:schedule_duration_seconds", "The scheduling part of a step.", _STEP, STEP_BUCKETS_S),
)

METRICS: Final[dict[str, MetricDef]] = {definition.name: definition for definition in _DEFINITIONS}


def metrics_table_markdown() -> str:
    """Return METRICS as a Markdown table: what README shows."""
    lines = ["| name | kind | own labels | what it says | counted |", "| --- | --- | --- | --- | --- |"]
    for definition in METRICS.values():
        labels = ", ".join(f"`{label}`" for label in definition.labels)
        if definition.label_values:
            labels += ": " + ", ".join(definition.label_values)
        lines.append(
            f"| `{definition.exposed_name}` | {definition.kind.value} | {labels} | {definition.help} "
            f"| {definition.origin} |"
        )
    return "\n".join(lines) + "\n"
