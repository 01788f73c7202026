"""What the engine process is told: which model, on which device, with how much KV cache. Imports no torch.

`EngineConfig` only carries the parts to the builder; no class below it receives more than its own part.
"""

from dataclasses import dataclass, field
from typing import Literal

from kvctl.core.config import CacheConfig, SchedulerConfig

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
CpuKernels = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Where the weights are and how they are loaded. `folder` is an ordinary Hugging Face model folder."""

    folder: str
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    seed: int = 0  # of dummy weights and of unseeded sampling


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Device, threads and the memory the KV cache may take. All None: a sane share is measured."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None  # CPU only
    cpu_kernels: CpuKernels = "auto"
    gpu_memory_utilization: float = 0.92  # CUDA only
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"  # auto: the model's; fp8 is e4m3
    num_gpu_blocks_override: int | None = None  # vLLM's name; holds on every device
    enforce_eager: bool = False  # CUDA only: no captured graphs


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `engine.build.build_engine_core` needs."""

    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    async_scheduling: bool = True  # plan the next step while one runs
    fit_max_model_len: bool = False  # lower scheduler.max_model_len to what the KV cache holds, where it holds less


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What building the engine found out; shown at start, in /health details and in /metrics."""

    model_folder: str
    architecture: str
    dtype: str
    device: str  # "cpu" or "cuda:0"
    attention_backend: str  # "native", "torch", "triton"
    linear_backend: str  # "native", "onednn", "torch"
    num_blocks: int  # with the null block
    block_size: int  # tokens
    kv_cache_bytes: int
    kv_cache_dtype: str
    weight_bytes: int
    kv_tokens: int  # capacity in tokens, as vLLM prints it
    max_concurrency: float  # requests of max_model_len tokens, as vLLM prints it
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    num_threads: int
    load_s: float
    notes: tuple[str, ...] = ()  # lines worth a log: why a fallback was taken, how the KV budget was found
