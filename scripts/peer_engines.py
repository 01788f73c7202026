"""The engines that scripts/compare_engines.py runs, and where it looks for them.

Where the peers are (a peer without one is named as not run):
    KVCTL_PEER_VLLM        folder of a virtual environment, default ~/.cache/kvctl/peers/vllm
    KVCTL_PEER_OPENVINO    the same, default ~/.cache/kvctl/peers/openvino
    KVCTL_PEER_OV_MODEL    the exported model, default ~/.cache/kvctl/peers/ov-model
    KVCTL_PEER_LLAMACPP    the llama-server program, default ~/.cache/kvctl/peers/llama-server
    KVCTL_PEER_GGUF        its bfloat16 model, default ~/.cache/kvctl/peers/model.gguf
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from compare_report import KV_CACHE_GIB

PEERS = Path.home() / ".cache" / "kvctl" / "peers"


@dataclass(frozen=True, slots=True)
class Engine:
    """`command` takes the port and starts a server; None: driven in process by `python`."""

    name: str
    missing: Path | None  # what would have to be there
    command: Callable[[int], list[str]] | None
    environment: dict[str, str]
    python: str = sys.executable
    model: Path = Path()


def place(variable: str, default: str) -> Path:
    """Where a peer is said to be."""
    return Path(os.environ.get(variable) or PEERS / default)


def known_engines(model: Path) -> list[Engine]:
    """Ours twice, then the peers."""
    vllm, openvino = place("KVCTL_PEER_VLLM", "vllm"), place("KVCTL_PEER_OPENVINO", "openvino")
    ov_model = place("KVCTL_PEER_OV_MODEL", "ov-model")
    llama, gguf = place("KVCTL_PEER_LLAMACPP", "llama-server"), place("KVCTL_PEER_GGUF", "model.gguf")
    threads = str(os.cpu_count() or 1)

    def first_missing(*paths: Path) -> Path | None:
        return next((path for path in paths if not path.exists()), None)

    def kvctl_serve(port: int) -> list[str]:
        options = f"--port {port} --max-model-len 2048 --kv-cache-memory-bytes {KV_CACHE_GIB}GiB"
        return [sys.executable, "-m", "kvctl", "serve", str(model), *options.split()]

    def vllm_serve(port: int) -> list[str]:
        options = f"--host 127.0.0.1 --port {port} --dtype bfloat16 --max-model-len 2048"
        return [str(vllm / "bin" / "vllm"), "serve", str(model), *options.split()]

    def llama_server(port: int) -> list[str]:
        options = (
            f"--host 127.0.0.1 --port {port} -np 64 -c 32768 -t {threads} -tb {threads} -cb -b 2048 -ub 512 -fa on"
        )
        return [str(llama), "-m", str(gguf), *options.split()]

    return [
        Engine("kvctl", None, kvctl_serve, {}),
        Engine("kvctl, in process", None, None, {}, model=model),
        Engine("vLLM", first_missing(vllm / "bin" / "vllm"), vllm_serve, vllm_environment(vllm)),
        Engine("llama.cpp", first_missing(llama, gguf), llama_server, {}),
        Engine(
            "OpenVINO GenAI, in process",
            first_missing(openvino / "bin" / "python", ov_model),
            None,
            {},
            str(openvino / "bin" / "python"),
            ov_model,
        ),
    ]


def peer_environment() -> dict[str, str]:
    """Ours without what slows a current OpenBLAS down, and without a model hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def vllm_environment(venv: Path) -> dict[str, str]:
    """All cores for the model, and the allocator and the OpenMP its documentation asks for, where they are."""
    preloaded = [*Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"), venv / "lib" / "libiomp5.so"]
    found = ":".join(str(path) for path in preloaded if path.exists())
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default it keeps a core for itself
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "LD_PRELOAD": found,
    }
