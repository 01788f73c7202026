"""How each kind of server spells the setting that an advice wants changed.

A table and the function that fills in a value. Only settings that we are sure of are listed. Floor 3.
"""

from collections.abc import Mapping
from enum import StrEnum

from kvctl.metrics.server_names import Server


class Setting(StrEnum):
    """A setting by what it means."""

    SEATS = "seats"
    STEP_TOKENS = "step_tokens"
    KV_MEMORY = "kv_memory"
    MEMORY_SHARE = "memory_share"
    KV_DTYPE = "kv_dtype"
    BLOCK_SIZE = "block_size"
    KV_OFFLOAD = "kv_offload"
    PREFIX_CACHING = "prefix_caching"
    API_PROCESSES = "api_processes"
    MAX_LORAS = "max_loras"
    QUANTIZATION = "quantization"
    TENSOR_PARALLEL = "tensor_parallel"
    LONG_PREFILL = "long_prefill"


_FLAGS: Mapping[Setting, Mapping[Server, str]] = {
    Setting.SEATS: {
        Server.KVCTL: "--max-num-seqs",
        Server.VLLM: "--max-num-seqs",
        Server.SGLANG: "--max-running-requests",
        Server.TGI: "--max-batch-size",
        Server.LLAMA_CPP: "--parallel",
        Server.TRTLLM: "--max_batch_size",
    },
    Setting.STEP_TOKENS: {
        Server.KVCTL: "--max-num-batched-tokens",
        Server.VLLM: "--max-num-batched-tokens",
        Server.SGLANG: "--chunked-prefill-size",
        Server.TGI: "--max-batch-prefill-tokens",
        Server.LLAMA_CPP: "--batch-size",
        Server.TRTLLM: "--max_num_tokens",
    },
    Setting.KV_MEMORY: {Server.KVCTL: "--kv-cache-memory-bytes", Server.VLLM: "--kv-cache-memory-bytes"},
    Setting.MEMORY_SHARE: {
        Server.KVCTL: "--gpu-memory-utilization",
        Server.VLLM: "--gpu-memory-utilization",
        Server.SGLANG: "--mem-fraction-static",
        Server.TGI: "--cuda-memory-fraction",
        Server.TRTLLM: "--kv_cache_free_gpu_memory_fraction",
    },
    Setting.KV_DTYPE: {Server.VLLM: "--kv-cache-dtype", Server.SGLANG: "--kv-cache-dtype"},
    Setting.BLOCK_SIZE: {
        Server.KVCTL: "--block-size",
        Server.VLLM: "--block-size",
        Server.SGLANG: "--page-size",
    },
    Setting.KV_OFFLOAD: {Server.VLLM: "--kv-offloading-size"},
    Setting.PREFIX_CACHING: {Server.KVCTL: "--enable-prefix-caching", Server.VLLM: "--enable-prefix-caching"},
    Setting.API_PROCESSES: {Server.VLLM: "--api-server-count"},
    Setting.MAX_LORAS: {Server.VLLM: "--max-loras"},
    Setting.QUANTIZATION: {Server.VLLM: "--quantization", Server.SGLANG: "--quantization"},
    Setting.TENSOR_PARALLEL: {Server.VLLM: "--tensor-parallel-size", Server.SGLANG: "--tp-size"},
    Setting.LONG_PREFILL: {
        Server.KVCTL: "--long-prefill-token-threshold",
        Server.VLLM: "--long-prefill-token-threshold",
    },
}


def flags(setting: Setting, value: str = "") -> tuple[tuple[Server, str], ...]:
    """Return `--flag value` in the spelling of every server that has the setting."""
    return tuple((server, f"{flag} {value}".rstrip()) for server, flag in _FLAGS[setting].items())
