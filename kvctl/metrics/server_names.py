"""What each inference server calls the things worth reading: one table, one row per reading.

Knows names only: no arithmetic, no I/O. A reading that a server does not publish has no entry, and its readers
get None. Several names in one entry are alternatives, newest first (servers rename: `gpu_cache_usage_perc` became
`kv_cache_usage_perc`, `sglang:` became `sglang_`). Floor 0.

Sources (read 2026-11): vLLM 0.32 /metrics of a running server; SGLang python/sglang/srt/metrics/collector.py;
TGI docs/source/reference/metrics.md; llama.cpp tools/server/README.md; TensorRT-LLM trtllm-serve /prometheus/metrics.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvctl.metrics.exposition import Page


class Server(StrEnum):
    """A kind of server, told from the names on its page."""

    KVCTL = "kvctl"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    TGI = "TGI"
    LLAMA_CPP = "llama.cpp"
    TRTLLM = "TensorRT-LLM"
    UNKNOWN = "unknown"


class Gauge(StrEnum):
    """A value that rises and falls, or a fixed setting."""

    RUNNING = "running"
    WAITING = "waiting"
    WAITING_CAPACITY = "waiting_capacity"
    WAITING_DEFERRED = "waiting_deferred"
    KV_USAGE = "kv_usage"  # 0 to 1
    KV_USED_TOKENS = "kv_used_tokens"
    KV_CAPACITY_TOKENS = "kv_capacity_tokens"
    KV_CACHE_BYTES = "kv_cache_bytes"
    HIT_RATE = "hit_rate"  # the server's own, over its own window
    MAX_NUM_SEQS = "max_num_seqs"
    MAX_NUM_BATCHED_TOKENS = "max_num_batched_tokens"
    MAX_MODEL_LEN = "max_model_len"
    PREEMPTED_NOW = "preempted_now"
    GENERATION_RATE = "generation_rate"  # tokens/s, the server's own
    ACCEPT_LENGTH = "accept_length"
    OFFLOAD_USAGE = "offload_usage"  # 0 to 1
    AWAKE = "awake"


class Counter(StrEnum):
    """A value that only rises until the server restarts."""

    PROMPT_TOKENS = "prompt_tokens"
    GENERATION_TOKENS = "generation_tokens"
    CACHED_PROMPT_TOKENS = "cached_prompt_tokens"
    PREEMPTIONS = "preemptions"
    PREFIX_QUERIES = "prefix_queries"  # tokens looked up
    PREFIX_HITS = "prefix_hits"  # tokens found
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"
    RECOMPUTED_TOKENS = "recomputed_tokens"
    DRAFT_TOKENS = "draft_tokens"
    ACCEPTED_TOKENS = "accepted_tokens"
    DRAFTS = "drafts"
    STEPS = "steps"
    CPU_SECONDS = "cpu_seconds"


class Timing(StrEnum):
    """A histogram (seconds, except the ones named _tokens)."""

    TTFT = "ttft"
    ITL = "itl"  # one observation per output event
    TPOT = "tpot"  # one observation per request
    E2E = "e2e"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    INFERENCE = "inference"
    STEP_TOKENS = "step_tokens"
    STEP_DURATION = "step_duration"
    REQUEST_PROMPT_TOKENS = "request_prompt_tokens"
    REQUEST_GENERATION_TOKENS = "request_generation_tokens"
    REQUEST_MAX_TOKENS = "request_max_tokens"
    BLOCK_IDLE_BEFORE_EVICT = "block_idle_before_evict"
    BLOCK_REUSE_GAP = "block_reuse_gap"


class Series(NamedTuple):
    """A name on the page and the labels that select the series; all matching series are summed."""

    name: str
    labels: Mapping[str, str] = {}


@dataclass(frozen=True)
class ServerNames:
    """How one kind of server spells its readings, and which labels tell its engines and its model apart."""

    prefixes: tuple[str, ...]  # a page with such a name is of this server
    gauges: Mapping[Gauge, tuple[Series, ...]]
    counters: Mapping[Counter, tuple[Series, ...]]
    timings: Mapping[Timing, tuple[Series, ...]]
    engine_labels: tuple[str, ...] = ()
    model_labels: tuple[str, ...] = ("model_name",)


def _names(*names: str, **labels: str) -> tuple[Series, ...]:
    return tuple(Series(name, labels) for name in names)


def _sglang(*names: str) -> tuple[Series, ...]:
    """SGLang writes `sglang:x`, since 2026 also `sglang_x`."""
    return tuple(Series(prefix + name) for name in names for prefix in ("sglang:", "sglang_"))


_VLLM_GAUGES = {
    Gauge.RUNNING: _names("vllm:num_requests_running"),
    Gauge.WAITING: _names("vllm:num_requests_waiting"),
    Gauge.WAITING_CAPACITY: _names("vllm:num_requests_waiting_by_reason", reason="capacity"),
    Gauge.WAITING_DEFERRED: _names("vllm:num_requests_waiting_by_reason", reason="deferred"),
    Gauge.KV_USAGE: _names("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    Gauge.OFFLOAD_USAGE: _names("vllm:cpu_cache_usage_perc"),
    Gauge.AWAKE: _names("vllm:engine_sleep_state", sleep_state="awake"),
}
_VLLM_COUNTERS = {
    Counter.PROMPT_TOKENS: _names("vllm:prompt_tokens_total"),
    Counter.GENERATION_TOKENS: _names("vllm:generation_tokens_total"),
    Counter.CACHED_PROMPT_TOKENS: _names("vllm:prompt_tokens_cached_total"),
    Counter.PREEMPTIONS: _names("vllm:num_preemptions_total"),
    Counter.PREFIX_QUERIES: _names("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    Counter.PREFIX_HITS: _names("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    Counter.FINISHED: _names("vllm:request_success_total"),
    Counter.ABORTED: _names("vllm:request_success_total", finished_reason="abort"),
    Counter.REJECTED: _names("vllm:admission_rejections_total"),
    Counter.DRAFT_TOKENS: _names("vllm:spec_decode_num_draft_tokens_total"),
    Counter.ACCEPTED_TOKENS: _names("vllm:spec_decode_num_accepted_tokens_total"),
    Counter.DRAFTS: _names("vllm:spec_decode_num_drafts_total"),
    Counter.CPU_SECONDS: _names("process_cpu_seconds_total"),
}
_VLLM_TIMINGS = {
    Timing.TTFT: _names("vllm:time_to_first_token_seconds"),
    Timing.ITL: _names("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    Timing.TPOT: _names("vllm:request_time_per_output_token_seconds"),
    Timing.E2E: _names("vllm:e2e_request_latency_seconds"),
    Timing.QUEUE: _names("vllm:request_queue_time_seconds"),
    Timing.PREFILL: _names("vllm:request_prefill_time_seconds"),
    Timing.DECODE: _names("vllm:request_decode_time_seconds"),
    Timing.INFERENCE: _names("vllm:request_inference_time_seconds"),
    Timing.STEP_TOKENS: _names("vllm:iteration_tokens_total"),
    Timing.REQUEST_PROMPT_TOKENS: _names("vllm:request_prompt_tokens"),
    Timing.REQUEST_GENERATION_TOKENS: _names("vllm:request_generation_tokens"),
    Timing.REQUEST_MAX_TOKENS: _names("vllm:request_params_max_tokens", "vllm:request_max_num_generation_tokens"),
    Timing.BLOCK_IDLE_BEFORE_EVICT: _names("vllm:kv_block_idle_before_evict_seconds"),
    Timing.BLOCK_REUSE_GAP: _names("vllm:kv_block_reuse_gap_seconds"),
}
_VLLM = ServerNames(("vllm:",), _VLLM_GAUGES, _VLLM_COUNTERS, _VLLM_TIMINGS, engine_labels=("engine",))
_KVCTL = ServerNames(
    ("kvctl:",),
    _VLLM_GAUGES
    | {
        Gauge.MAX_NUM_SEQS: _names("kvctl:max_num_seqs"),
        Gauge.MAX_NUM_BATCHED_TOKENS: _names("kvctl:max_num_batched_tokens"),
        Gauge.MAX_MODEL_LEN: _names("kvctl:max_model_len"),
        Gauge.KV_CACHE_BYTES: _names("kvctl:kv_cache_bytes"),
        Gauge.KV_CAPACITY_TOKENS: _names("kvctl:kv_cache_size_tokens"),
    },
    _VLLM_COUNTERS | {Counter.RECOMPUTED_TOKENS: _names("kvctl:recomputed_tokens_total")},
    _VLLM_TIMINGS | {Timing.STEP_DURATION: _names("kvctl:step_duration_seconds")},
    engine_labels=("engine",),
)
_SGLANG = ServerNames(
    ("sglang:", "sglang_"),
    {
        Gauge.RUNNING: _sglang("num_running_reqs"),
        Gauge.WAITING: _sglang("num_queue_reqs"),
        Gauge.WAITING_DEFERRED: _sglang("num_grammar_queue_reqs"),
        Gauge.KV_USAGE: _sglang("full_token_usage", "token_usage"),
        Gauge.KV_USED_TOKENS: _sglang("num_used_tokens"),
        Gauge.KV_CAPACITY_TOKENS: _sglang("max_total_num_tokens"),
        Gauge.HIT_RATE: _sglang("cache_hit_rate"),
        Gauge.MAX_NUM_SEQS: _sglang("max_running_requests"),
        Gauge.MAX_NUM_BATCHED_TOKENS: _sglang("chunked_prefill_size", "max_prefill_tokens"),
        Gauge.MAX_MODEL_LEN: _sglang("context_len"),
        Gauge.PREEMPTED_NOW: _sglang("num_retracted_reqs"),
        Gauge.GENERATION_RATE: _sglang("gen_throughput"),
        Gauge.ACCEPT_LENGTH: _sglang("spec_accept_length"),
    },
    {
        Counter.PROMPT_TOKENS: _sglang("prompt_tokens_total"),
        Counter.GENERATION_TOKENS: _sglang("generation_tokens_total"),
        Counter.CACHED_PROMPT_TOKENS: _sglang("cached_tokens_total"),
        Counter.PREFIX_QUERIES: _sglang("prompt_tokens_total"),
        Counter.PREFIX_HITS: _sglang("cached_tokens_total"),
        Counter.PREEMPTIONS: _sglang("num_retracted_requests_total"),
        Counter.FINISHED: _sglang("num_requests_total"),
        Counter.ABORTED: _sglang("num_aborted_requests_total"),
    },
    {
        Timing.TTFT: _sglang("time_to_first_token_seconds"),
        Timing.ITL: _sglang("inter_token_latency_seconds", "time_per_output_token_seconds"),
        Timing.E2E: _sglang("e2e_request_latency_seconds"),
        Timing.QUEUE: _sglang("queue_time_seconds"),
        Timing.REQUEST_PROMPT_TOKENS: _sglang("prompt_tokens_histogram"),
        Timing.REQUEST_GENERATION_TOKENS: _sglang("generation_tokens_histogram"),
    },
    engine_labels=("dp_rank",),
)
_TGI = ServerNames(
    ("tgi_",),
    {
        Gauge.RUNNING: _names("tgi_batch_current_size"),
        Gauge.WAITING: _names("tgi_queue_size"),
        Gauge.KV_USED_TOKENS: _names("tgi_batch_current_max_tokens"),
    },
    {
        Counter.PROMPT_TOKENS: _names("tgi_request_input_length_sum"),
        Counter.GENERATION_TOKENS: _names("tgi_request_generated_tokens_sum"),
        Counter.FINISHED: _names("tgi_request_success", "tgi_request_success_total"),
        Counter.REJECTED: _names("tgi_request_failure", err="overloaded"),
    },
    {
        Timing.TPOT: _names("tgi_request_mean_time_per_token_duration"),
        Timing.E2E: _names("tgi_request_duration"),
        Timing.QUEUE: _names("tgi_request_queue_duration"),
        Timing.INFERENCE: _names("tgi_request_inference_duration"),
        Timing.REQUEST_PROMPT_TOKENS: _names("tgi_request_input_length"),
        Timing.REQUEST_GENERATION_TOKENS: _names("tgi_request_generated_tokens"),
        Timing.REQUEST_MAX_TOKENS: _names("tgi_request_max_new_tokens"),
    },
)
_LLAMA_CPP = ServerNames(
    ("llamacpp:",),
    {
        Gauge.RUNNING: _names("llamacpp:requests_processing"),
        Gauge.WAITING: _names("llamacpp:requests_deferred"),
        Gauge.KV_USAGE: _names("llamacpp:kv_cache_usage_ratio"),
        Gauge.KV_USED_TOKENS: _names("llamacpp:kv_cache_tokens"),
    },
    {
        Counter.PROMPT_TOKENS: _names("llamacpp:prompt_tokens_total"),
        Counter.GENERATION_TOKENS: _names("llamacpp:tokens_predicted_total"),
        Counter.STEPS: _names("llamacpp:n_decode_total"),
    },
    {},
)
_TRTLLM = ServerNames(
    ("trtllm_", "trtllm:"),
    {
        Gauge.RUNNING: _names("trtllm_num_requests_running"),
        Gauge.WAITING: _names("trtllm_num_requests_waiting"),
        Gauge.KV_USAGE: _names("trtllm_kv_cache_utilization"),
        Gauge.HIT_RATE: _names("trtllm_kv_cache_hit_rate"),
        Gauge.OFFLOAD_USAGE: _names("trtllm_kv_cache_host_utilization"),
    },
    {
        Counter.FINISHED: _names("trtllm_request_success_total"),
        Counter.PREFIX_HITS: _names("trtllm_kv_cache_reused_blocks_total"),
    },
    {
        Timing.TTFT: _names("trtllm_time_to_first_token_seconds"),
        Timing.TPOT: _names("trtllm_time_per_output_token_seconds"),
        Timing.E2E: _names("trtllm_e2e_request_latency_seconds"),
        Timing.QUEUE: _names("trtllm_request_queue_time_seconds"),
    },
)
SERVER_NAMES: Mapping[Server, ServerNames] = {
    Server.KVCTL: _KVCTL,  # before vLLM: its page has the vllm: names too
    Server.VLLM: _VLLM,
    Server.SGLANG: _SGLANG,
    Server.TGI: _TGI,
    Server.LLAMA_CPP: _LLAMA_CPP,
    Server.TRTLLM: _TRTLLM,
    Server.UNKNOWN: ServerNames((), {}, {}, {}),
}


def detect_server(page: Page) -> Server:
    """Tell the kind of server from the names on its page."""
    for server, names in SERVER_NAMES.items():
        if names.prefixes and any(name.startswith(names.prefixes) for name in page.series):
            return server
    return Server.UNKNOWN
