"""What a server's start-up log or /metrics page says about its memory: the numbers, none of the meaning.

Knows the lines of vLLM (0.2 to 0.28), SGLang, TensorRT-LLM, llama.cpp and kvctl; unknown lines are passed over. Engines
print GB where they mean GiB.
Floor 1.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

from kvctl.units import GIB, MIB, parse_bytes

_NUMBER = r"([-+]?[\d,]*\.?\d+)"


@dataclass(frozen=True, slots=True)
class ServerLog:
    """Facts of one run; None: not printed. With several ranks, the smallest KV memory counts (engines do so)."""

    engine: str | None = None
    version: str | None = None
    model: str | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    num_blocks: int | None = None
    block_size: int | None = None
    block_bytes: int | None = None
    given_kv_bytes: int | None = None  # asked for outright: says nothing about overheads
    kv_tokens: int | None = None
    concurrency: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    kv_dtype: str | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing about memory was found."""
        return self.kv_bytes is None and self.num_blocks is None and self.kv_tokens is None


def _gib(text: str) -> int:
    return int(float(text.replace(",", "")) * GIB)


def _mib(text: str) -> int:
    return int(float(text.replace(",", "")) * MIB)


def _int(text: str) -> int:
    return int(float(text.replace(",", "")))


def _bytes(text: str) -> int:
    return parse_bytes(text)


# (field, pattern, reader). The first match of a field counts, except where several ranks print it.
_LINES: tuple[tuple[str, re.Pattern[str], Any], ...] = tuple(
    (name, re.compile(pattern), reader)
    for name, pattern, reader in (
        ("version", r"(?:vLLM API server version|\(v|LLM engine \(v|vllm version:?) ?v?(\d+\.\d+(?:\.\d+)?)", str),
        ("total_bytes", rf"total_gpu_memory[ =(]+{_NUMBER} ?GiB", _gib),
        ("total_bytes", rf"[Tt]otal (?:gpu )?memory:? {_NUMBER} ?GiB", _gib),
        ("utilization", r"gpu_memory_utilization['\"]?[=: (\"]+(\d*\.?\d+)", float),
        ("utilization", r"mem_fraction_static[=: ]+(\d*\.?\d+)", float),
        ("weights_bytes", rf"model weights take +{_NUMBER} ?GiB", _gib),
        ("weights_bytes", rf"(?:Model loading took|Loading model weights took) {_NUMBER} ?Gi?B", _gib),
        ("weights_bytes", rf"Load weight end\..*mem usage={_NUMBER} GB", _gib),
        ("non_torch_bytes", rf"non_torch_memory(?: takes)?[ =]+{_NUMBER} ?GiB", _gib),
        ("activation_bytes", rf"PyTorch activation peak memory(?: takes)? +{_NUMBER} ?GiB", _gib),
        ("kv_bytes", rf"(?:reserved for KV Cache is|Available KV cache memory:) {_NUMBER} ?GiB", _gib),
        ("kv_bytes", rf"(?:kv_cache_size=|available_kv_cache_memory +){_NUMBER} ?GiB", _gib),
        ("kv_bytes", rf"Allocated {_NUMBER} GiB for max tokens in paged KV cache", _gib),
        ("kv_bytes", rf"kv_cache.*: size = +{_NUMBER} MiB \( *\d+ cells", _mib),
        ("kv_tokens", r"max tokens in paged KV cache \((\d+)\)", _int),
        ("kv_tokens", r"kv_cache.*: size = +[\d.]+ MiB \( *(\d+) cells", _int),
        ("kv_bytes", rf"KV cache memory (?:in use|budget)[^0-9]*{_NUMBER} ?GiB", _gib),
        ("graph_bytes", rf"Graph capturing finished in .* took {_NUMBER} ?GiB", _gib),
        ("kv_tokens", rf"KV cache size: {_NUMBER} tokens", _int),
        ("kv_tokens", r"#tokens: (\d+)", _int),
        ("kv_tokens", r"max_total_num_tokens=(\d+)", _int),
        ("num_blocks", r"# (?:GPU|cuda) blocks: (\d+)", _int),
        ("num_blocks", rf"KV blocks: {_NUMBER} of", _int),
        ("num_blocks", r"num_gpu_blocks=\"(\d+)\"", _int),
        ("weights_bytes", r"Memory: weights ([\d.]+ [KMGT]?i?B)\b", _bytes),
        ("given_kv_bytes", r"KV cache ([\d.]+ [KMGT]?i?B) \(--kv-cache-memory-bytes\)", _bytes),
        ("given_kv_bytes", r"'kv_cache_memory_bytes': (\d+)", _int),
        ("given_kv_bytes", rf"reserved {_NUMBER} ?GiB memory for KV Cache as specified", _gib),
        ("labelled_kv_bytes", r"kv_cache_memory_bytes=\"(\d+)\"", _int),
        ("block_bytes", r"KV blocks: [\d,]+ of \d+ tokens, ([\d.]+ [KMGT]?i?B) each", _bytes),
        ("block_size", r"KV blocks: [\d,]+ of (\d+) tokens", _int),
        ("block_size", r"block_size=\"(\d+)\"", _int),
        ("kv_dtype", r"cache_dtype=\"(\w+)\"", str),
        ("kv_dtype", r"'kv_cache_dtype': '(\w+)'", str),
        ("kv_dtype", r"kv_cache_dtype=(\w+)", str),
        ("concurrency", rf"[Mm]aximum concurrency for [\d,]+ tokens per request:? (?:is )?{_NUMBER}x", float),
        ("max_model_len", rf"[Mm]aximum concurrency for {_NUMBER} tokens", _int),
        ("max_model_len", r"max_model_len['\"]?[=: ]+(\d+)|max_seq_len=(\d+)|context_len=(\d+)", _int),
        ("max_model_len", r"[Uu]sing max model len (\d+)", _int),
        ("max_num_seqs", r"max_num_seqs['\"]?[=: ]+(\d+)", _int),
        ("max_num_batched_tokens", r"max_num_batched_tokens['\"]?[=: ]+(\d+)", _int),
        ("tensor_parallel", r"tensor_parallel_size['\"]?[=: ]+(\d+)|tp_size=(\d+)", _int),
        ("pipeline_parallel", r"pipeline_parallel_size['\"]?[=: ]+(\d+)|pp_size=(\d+)", _int),
        ("model", r"(?:'model': '|model=')([^']+)'", str),
    )
)
_K_V_SIZE = re.compile(rf"K size: {_NUMBER} GB, V size: {_NUMBER} GB")
_MARKS = (
    ("sglang", ("sglang", "mem_fraction_static")),
    ("kvctl", ("kvctl",)),
    ("trtllm", ("tensorrt-llm",)),
    ("llama.cpp", ("llama_kv_cache", "llama_model_loader")),
    (
        "vllm",
        ("vllm", "gpu kv cache size", "llm engine (v", "pytorch activation peak", "# gpu blocks", "# cuda blocks"),
    ),
)
_SMALLEST = {"kv_bytes", "kv_tokens", "num_blocks"}


def parse_server_log(text: str) -> ServerLog:
    """Read a log or a metrics page; never fails, an unknown text gives an empty answer."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        for name, pattern, reader in _LINES:
            if name in found and name not in _SMALLEST:
                continue
            match = pattern.search(line)
            if match is None:
                continue
            value = reader(next(group for group in match.groups() if group is not None))
            found[name] = min(found[name], value) if name in found else value
        match = _K_V_SIZE.search(line)
        if match is not None:
            kv_bytes = _gib(match[1]) + _gib(match[2])
            found["kv_bytes"] = min(found.get("kv_bytes", kv_bytes), kv_bytes)
            found["engine"] = "sglang"
    if "engine" not in found:
        lowered = text.lower()
        found["engine"] = next((name for name, marks in _MARKS if any(mark in lowered for mark in marks)), None)
    labelled = found.pop("labelled_kv_bytes", None)
    if labelled is not None:  # kvctl writes there what it took, vLLM what it was given
        found["kv_bytes" if found["engine"] == "kvctl" else "given_kv_bytes"] = labelled
    known = {f.name for f in fields(ServerLog)}
    return ServerLog(**{k: v for k, v in found.items() if k in known})
