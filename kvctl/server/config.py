"""What `kvctl serve` was asked for, before anything is known about the model. None: decide from model and device.

Plain data, built by the command or by a caller; `engine_config.py` turns it into the engine's own. Floor 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvctl.core.config import CacheConfig, SchedulingPolicy
from kvctl.engine.config import DeviceConfig, Dtype, LoadFormat
from kvctl.server.options import ApiOptions

AUTO_LENGTH = -1  # max_model_len: the model's own, lowered to what the KV cache holds
POLLED_PATHS = ("/health", "/ping", "/metrics", "/load")
PerformanceMode = Literal["balanced", "throughput", "interactivity"]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how it is read."""

    name: str | None = None  # None: the demo model
    revision: str | None = None
    served_names: tuple[str, ...] = ()
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0
    max_model_len: int | None = None  # tokens; None: the model's own; or AUTO_LENGTH
    chat_template: str | None = None  # Jinja text, or a file with it
    generation_config: str = "auto"  # "auto": the model's; "vllm": none; else a folder or file
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    max_logprobs: int = 20


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of a step; None: decide from the device."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    policy: SchedulingPolicy = "fcfs"
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    reserve_full_isl: bool = True
    watermark: float = 0.0
    performance_mode: PerformanceMode = "balanced"
    async_scheduling: bool = True


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Where the server listens and what it logs about it."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    uds: str | None = None  # a Unix socket instead
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    log_level: str = "info"
    access_log: bool = True
    quiet_paths: tuple[str, ...] = POLLED_PATHS  # not in the access log


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `launch` needs."""

    model: ModelOptions = field(default_factory=ModelOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    cache: CacheConfig = field(default_factory=CacheConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    api: ApiOptions = field(default_factory=ApiOptions)
    max_num_queued_reqs: int | None = None
    shutdown_timeout_s: float = 0.0
    stall_timeout_s: float | None = 60.0  # /health says 503 after so long without progress; None: never
    log_level: str = "info"
    log_stats: bool = True
