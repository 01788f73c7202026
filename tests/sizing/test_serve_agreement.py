"""`size` predicts what `serve` allocates: bytes, blocks, tokens, concurrency and the line that serve prints."""

import json
import time
from pathlib import Path

import pytest

from kvctl.core.config import CacheConfig, SchedulerConfig
from kvctl.engine import memory_budget
from kvctl.engine.build import build_engine_core
from kvctl.engine.config import DeviceConfig, EngineConfig, EngineInfo, ModelConfig
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.model.model_shape import ModelShape
from kvctl.sizing import memory
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from tests.support import tiny_models

KV_BYTES = 3_000_001  # not a multiple of any block
LIMITS = SchedulerConfig(max_model_len=160, max_num_seqs=4, max_num_batched_tokens=48)


def folder_of(tiny: tiny_models.TinyModel, folder: Path) -> Path:
    config = tiny.make_config()
    raw = {**config.to_dict(), "architectures": [tiny_models.architecture(config)]}
    (folder / "config.json").write_text(json.dumps(raw, default=str))
    return folder


def served(folder: Path, block_size: int, kv_dtype: str = "auto") -> tuple[EngineInfo, list[str]]:
    lines: list[str] = []
    config = EngineConfig(
        model=ModelConfig(str(folder), dtype="float32", load_format="dummy"),
        scheduler=LIMITS,
        cache=CacheConfig(block_size=block_size),
        device=DeviceConfig(
            device="cpu", num_threads=1, cpu_kernels="torch", kv_cache_memory_bytes=KV_BYTES, kv_cache_dtype=kv_dtype
        ),  # type: ignore[arg-type]
    )
    _, info = build_engine_core(config, time.monotonic, lines.append)
    return info, lines


def sized(folder: Path, block_size: int, kv_dtype: str = "auto") -> SizeAnswer:
    return size_up(
        SizeRequest(
            model=load_model(str(folder)),
            engine="kvctl",
            kv_bytes=KV_BYTES,
            dtype="float32",
            kv_dtype=kv_dtype,
            block_size=block_size,
            max_model_len=LIMITS.max_model_len,
            max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        )
    )


@pytest.mark.parametrize("block_size", [16, 8])
@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_what_size_predicts_is_what_serve_allocates(
    tiny: tiny_models.TinyModel, block_size: int, tmp_path: Path
) -> None:
    folder = folder_of(tiny, tmp_path)
    info, lines = served(folder, block_size)
    answer = sized(folder, block_size)
    capacity = answer.capacity
    assert capacity is not None and answer.pool is not None and answer.weights is not None
    assert capacity.num_blocks == info.num_blocks
    assert capacity.num_blocks * answer.pool.block_bytes == info.kv_cache_bytes
    assert capacity.kv_tokens == info.kv_tokens
    assert capacity.max_concurrency == info.max_concurrency
    assert answer.weights.total_bytes == info.weight_bytes
    printed = (
        f"KV cache size: {capacity.kv_tokens:,} tokens, Maximum concurrency for {capacity.max_model_len:,} "
        f"tokens per request: {capacity.max_concurrency:.2f}x"
    )
    assert printed in lines


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
@pytest.mark.parametrize("kv_dtype", ["fp8", "fp8_e5m2"])
def test_an_fp8_cache_is_predicted_too(tiny: tiny_models.TinyModel, kv_dtype: str, tmp_path: Path) -> None:
    folder = folder_of(tiny, tmp_path)
    info, _ = served(folder, 16, kv_dtype)
    capacity = sized(folder, 16, kv_dtype).capacity
    assert capacity is not None
    assert (capacity.num_blocks, capacity.kv_tokens) == (info.num_blocks, info.kv_tokens)


@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_windows_of_the_layers_are_read_alike(tiny: tiny_models.TinyModel, tmp_path: Path) -> None:
    raw = json.loads((folder_of(tiny, tmp_path) / "config.json").read_text())
    served_windows = parse_decoder_config(raw).windows
    assert [layer.window_tokens for layer in ModelShape.from_config(raw).layers] == list(served_windows)


def test_the_share_of_a_cpus_memory_is_serves() -> None:
    assert (memory.CPU_SHARE, memory.CPU_LIMIT_BYTES) == (memory_budget.CPU_SHARE, memory_budget.CPU_LIMIT_BYTES)
