"""The options of `kvctl serve`, one type each: flag names and meanings are vLLM's, sizes read as people write them.

Knows typer and how to parse a value, nothing of what a value does. Floor 4.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvctl.errors import ConfigError
from kvctl.units import parse_bytes, parse_count, parse_seconds

MODEL, CACHE, SCHEDULER = "Model", "KV cache", "Scheduler"
API, DEVICE, OBSERVABILITY = "API", "Device", "Observability"
AUTO_LENGTH = -1


class DtypeName(StrEnum):
    """What weights, activations and cache are kept in."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    HALF = "half"
    FLOAT = "float"


class LoadFormatName(StrEnum):
    """Where weights come from."""

    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class HashName(StrEnum):
    """How blocks are named in the prefix cache."""

    SHA256 = "sha256"
    XXHASH = "xxhash"


class KVCacheDtypeName(StrEnum):
    """What keys and values are kept in."""

    AUTO = "auto"
    FP8 = "fp8"
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"


class PolicyName(StrEnum):
    """Who runs first."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class ModeName(StrEnum):
    """What the defaults favour."""

    BALANCED = "balanced"
    THROUGHPUT = "throughput"
    INTERACTIVITY = "interactivity"


class DeviceName(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class CpuKernelsName(StrEnum):
    """What computes on a CPU."""

    AUTO = "auto"
    NATIVE = "native"
    TORCH = "torch"


class LogLevelName(StrEnum):
    """Least severity that is logged."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"


class ServerLogLevelName(StrEnum):
    """The HTTP server's least severity."""

    CRITICAL = "critical"
    ERROR = "error"
    WARNING = "warning"
    INFO = "info"
    DEBUG = "debug"
    TRACE = "trace"


def parse_length(text: str) -> int:
    """Read '32k', '8192' or 'auto' (-1).

    Raises:
        ConfigError: something else, or under 1.
    """
    if text in ("auto", "-1"):
        return AUTO_LENGTH
    return parse_positive(text)


def parse_positive(text: str) -> int:
    """Read a count of 1 or more.

    Raises:
        ConfigError: something else.
    """
    count = parse_count(text)
    if count < 1:
        raise ConfigError(f"{text!r} is under 1", hint="Give a whole number of 1 or more.")
    return count


def parse_size(text: str) -> int:
    """Read a number of bytes of 1 or more.

    Raises:
        ConfigError: something else.
    """
    size_bytes = parse_bytes(text)
    if size_bytes < 1:
        raise ConfigError(f"{text!r} is under a byte", hint="Write it like 32MiB.")
    return size_bytes


def parse_timeout(text: str | float) -> float:
    """Read '30', '2m' or the default, which is a number already.

    Raises:
        ConfigError: something else.
    """
    return text if isinstance(text, float) else parse_seconds(text)


def parse_json_object(text: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ConfigError: something else.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not JSON: {error}", hint="""Write it like '{"temperature": 0.7}'.""") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r} is no JSON object", hint="""Write it like '{"temperature": 0.7}'.""")
    return value


def _option(panel: str, help_: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_, rich_help_panel=panel, **more)


def _size(panel: str, help_: str, parser: Any, metavar: str) -> Any:
    return typer.Option(help=help_, rich_help_panel=panel, parser=parser, metavar=metavar, show_default=False)


# ---- Model ----
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help="Hub id, folder or .gguf file; the demo model if left out.", show_default=False
    ),
]
Revision = Annotated[str | None, _option(MODEL, "Branch, tag or commit of a hub model.", metavar="NAME")]
ServedModelName = Annotated[
    list[str] | None,
    _option(MODEL, "Name in the API and in metrics; more than one may be given.", metavar="NAME", show_default=False),
]
Dtype = Annotated[
    DtypeName, _option(MODEL, "Of weights, activations and KV cache.", metavar="auto|bfloat16|float16|float32")
]
LoadFormat = Annotated[
    LoadFormatName, _option(MODEL, "'dummy' makes random weights from config.json alone.", metavar="auto|dummy")
]
Seed = Annotated[int, _option(MODEL, "Of unseeded sampling and of dummy weights.")]
MaxModelLen = Annotated[
    int | None,
    _size(
        MODEL,
        "Most tokens of a request, prompt and output (32k, 32K); the model's own; auto: what fits.",
        parse_length,
        "TOKENS",
    ),
]
ChatTemplate = Annotated[
    str | None, _option(MODEL, "File with a Jinja chat template, or the template.", metavar="FILE")
]
GenerationConfig = Annotated[
    str,
    _option(
        MODEL, "Sampling defaults: 'auto' the model's, 'vllm' none, or a folder or file.", metavar="auto|vllm|PATH"
    ),
]
OverrideGenerationConfig = Annotated[
    dict[str, Any] | None,
    _size(MODEL, """Sampling defaults as JSON: '{"temperature": 0.7}'.""", parse_json_object, "JSON"),
]
MaxLogprobs = Annotated[int, _option(MODEL, "Most logprobs per token a request may ask for; -1: no limit.")]

# ---- KV cache ----
KVCacheMemoryBytes = Annotated[
    int | None,
    _size(CACHE, "Memory for KV blocks, like 12.3GiB; wins over --gpu-memory-utilization.", parse_bytes, "SIZE"),
]
NumGpuBlocksOverride = Annotated[
    int | None, _size(CACHE, "Number of KV blocks, on any device.", parse_positive, "BLOCKS")
]
GpuMemoryUtilization = Annotated[
    float, _option(CACHE, "Share of the GPU's memory to use in all.", metavar="SHARE", min=0.0, max=1.0)
]
KVCacheDtype = Annotated[KVCacheDtypeName, _option(CACHE, "auto: the model's; fp8 is fp8_e4m3.", metavar="DTYPE")]
BlockSize = Annotated[int, _option(CACHE, "Tokens of a KV block.", metavar="TOKENS")]
EnablePrefixCaching = Annotated[bool, _option(CACHE, "Share the KV blocks of equal prefixes.")]
PrefixCachingHashAlgo = Annotated[HashName, _option(CACHE, "How blocks are named; xxhash is quicker.")]

# ---- Scheduler ----
MaxNumSeqs = Annotated[
    int | None,
    _size(SCHEDULER, "Most requests running at once; by default from the device.", parse_positive, "REQUESTS"),
]
MaxNumBatchedTokens = Annotated[
    int | None,
    _size(SCHEDULER, "Most tokens computed in a step; by default from the device.", parse_positive, "TOKENS"),
]
SchedulingPolicy = Annotated[PolicyName, _option(SCHEDULER, "fcfs: first come first served; priority: lower first.")]
EnableChunkedPrefill = Annotated[bool, _option(SCHEDULER, "Compute long prompts over several steps.")]
LongPrefillTokenThreshold = Annotated[
    int, _option(SCHEDULER, "Most prompt tokens of one request in a step; 0: no such limit.", metavar="TOKENS")
]
SchedulerReserveFullIsl = Annotated[bool, _option(SCHEDULER, "Admit a request only when its whole prompt has room.")]
Watermark = Annotated[float, _option(SCHEDULER, "Share of the KV blocks kept free when admitting.", metavar="SHARE")]
PerformanceMode = Annotated[
    ModeName,
    _option(
        SCHEDULER,
        "balanced, throughput (doubles default tokens and requests), interactivity (short steps on a CPU).",
        metavar="MODE",
    ),
]
AsyncScheduling = Annotated[bool, _option(SCHEDULER, "Plan the next step while one runs.")]

# ---- API ----
Host = Annotated[str, _option(API, "Address to listen on; 0.0.0.0 for all.", metavar="ADDRESS")]
Port = Annotated[int, _option(API, "Port to listen on; 0: any free one.", metavar="PORT", min=0, max=65535)]
Uds = Annotated[str | None, _option(API, "Listen on this Unix socket instead.", metavar="PATH", show_default=False)]
RootPath = Annotated[str, _option(API, "Path prefix that a proxy strips.", metavar="PATH", show_default=False)]
ApiKey = Annotated[
    list[str] | None,
    _option(
        API,
        "Key that /v1 asks for; more than one may be given.",
        metavar="KEY",
        envvar=["KVCTL_API_KEY", "VLLM_API_KEY"],
    ),
]
AllowedOrigins = Annotated[
    list[str] | None,
    _option(
        API, "Origin that browsers may call from; more than one may be given.", metavar="ORIGIN", show_default=False
    ),
]
SslKeyfile = Annotated[str | None, _option(API, "TLS key.", metavar="FILE", show_default=False)]
SslCertfile = Annotated[str | None, _option(API, "TLS certificate.", metavar="FILE", show_default=False)]
SslCaCerts = Annotated[
    str | None, _option(API, "Certificates of clients' authorities.", metavar="FILE", show_default=False)
]
SslCertReqs = Annotated[int, _option(API, "2: ask clients for a certificate.", metavar="0|1|2", min=0, max=2)]
MaxNumQueuedReqs = Annotated[
    int | None, _size(API, "Most requests in flight; beyond it 503 with Retry-After.", parse_positive, "REQUESTS")
]
MaxBodySize = Annotated[
    int | None,
    _size(API, "Largest body of a request; 8MiB. Larger ones hold up others while they are read.", parse_size, "SIZE"),
]
ResponseRole = Annotated[str, _option(API, "Role of chat answers.", metavar="ROLE")]
TrustRequestChatTemplate = Annotated[bool, _option(API, "Allow chat templates in requests.")]
DefaultChatTemplateKwargs = Annotated[
    dict[str, Any] | None, _size(API, "Chat template variables as JSON.", parse_json_object, "JSON")
]
ReturnTokensAsTokenIds = Annotated[bool, _option(API, "Name tokens 'token_id:N' in logprobs.")]
EnableForceIncludeUsage = Annotated[bool, _option(API, "Send usage with every stream.")]
EnableRequestIdHeaders = Annotated[bool, _option(API, "Answer with X-Request-Id.")]
ShutdownTimeout = Annotated[
    float,
    typer.Option(
        help="On SIGTERM, seconds that running requests get.",
        rich_help_panel=API,
        parser=parse_timeout,
        metavar="SECONDS",
    ),
]
EngineStallTimeout = Annotated[
    float,
    typer.Option(
        help="/health says 503 when the engine has work and makes no progress for so long; 0: never.",
        rich_help_panel=API,
        parser=parse_timeout,
        metavar="SECONDS",
    ),
]

# ---- Device ----
Device = Annotated[DeviceName, _option(DEVICE, "Where the model runs.")]
Threads = Annotated[int | None, _size(DEVICE, "CPU threads; all cores.", parse_positive, "THREADS")]
CpuKernels = Annotated[CpuKernelsName, _option(DEVICE, "native: compiled at first use; torch: always there.")]
EnforceEager = Annotated[bool, _option(DEVICE, "On CUDA: no captured graphs.")]

# ---- Observability ----
LogLevel = Annotated[LogLevelName, _option(OBSERVABILITY, "Of this server's log.", metavar="LEVEL")]
UvicornLogLevel = Annotated[ServerLogLevelName, _option(OBSERVABILITY, "Of the HTTP server's log.", metavar="LEVEL")]
DisableUvicornAccessLog = Annotated[
    bool, _option(OBSERVABILITY, "No line per HTTP request.", "--disable-uvicorn-access-log", "--disable-access-log")
]
DisableAccessLogForEndpoints = Annotated[
    str | None,
    _option(OBSERVABILITY, "More paths without such a line, comma-separated.", metavar="PATHS", show_default=False),
]
DisableLogStats = Annotated[bool, _option(OBSERVABILITY, "No line every ten seconds.")]
EnableLogRequests = Annotated[bool, _option(OBSERVABILITY, "A line per request with its parameters.")]

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML file with flags as keys; flags given here win.", show_default=False
    ),
]
