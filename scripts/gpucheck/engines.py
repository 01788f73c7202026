"""Whole engines on the device: the same tokens in every way of running, and how fast a model of 7B runs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from gpucheck.bench import Bench
from kvctl.core.config import SchedulerConfig
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.build import build_engine_core
from kvctl.engine.cascade import CascadeRule
from kvctl.engine.config import DeviceConfig, EngineConfig, ModelConfig
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.models.weight_layout import all_tensors

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
TINY = QWEN_7B | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512, "rope_theta": 1e4,
}  # fmt: skip
SMALL_LIMITS = SchedulerConfig(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512)
LIMITS = SchedulerConfig(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=8192)


def save_tiny(folder: Path) -> None:
    """A random model as a checkpoint: the same weights on every device. Drawn wide, so that near ties are rare."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    (folder / "config.json").write_text(json.dumps(TINY))
    tensors = {}
    for packed in all_tensors(parse_decoder_config(TINY)):
        for part in packed.parts:
            noise = torch.randn(part.shape, generator=generator)
            tensors[part.name] = 1 + 0.1 * noise if packed.is_norm else 0.2 * noise
    save_file(tensors, str(folder / "model.safetensors"))


def build(bench: Bench, model: ModelConfig, limits: SchedulerConfig, **changes: Any) -> tuple[Any, Any, list[str]]:
    """A core, what it found out, and its log."""
    device = DeviceConfig(
        device="cpu" if bench.dry else "cuda",
        num_gpu_blocks_override=200 if limits is SMALL_LIMITS else None,
        enforce_eager=changes.pop("enforce_eager", False),
        kv_cache_dtype=changes.pop("kv_cache_dtype", "auto"),
        cpu_kernels="torch",
    )
    lines: list[str] = []
    config = EngineConfig(model=model, scheduler=limits, device=device, **changes)
    core, info = build_engine_core(config, time.monotonic, lines.append)
    return core, info, lines


def generate(
    core: Any, prompts: list[list[int]], max_tokens: int, name: str = "r"
) -> tuple[dict[str, list[int]], float]:
    """Greedy tokens per request and the seconds it took."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(Request(f"{name}{index}", prompt, params))
    tokens: dict[str, list[int]] = {f"{name}{index}": [] for index in range(len(prompts))}
    started = time.monotonic()
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens, time.monotonic() - started


def prompts_of(count: int, length: int, vocab: int, shared: int = 0) -> list[list[int]]:
    """Random prompts; the first `shared` tokens are the same in all."""
    generator = torch.Generator().manual_seed(count * 1000 + length)
    head = torch.randint(3, vocab, (shared,), generator=generator).tolist()
    return [head + torch.randint(3, vocab, (length - shared,), generator=generator).tolist() for _ in range(count)]


def tiny_engine(bench: Bench) -> Iterator[Row]:
    """A tiny random model in float32: the same greedy tokens eager and captured, synchronous and overlapped, with a
    cascade, and as the CPU gives (on a GPU, where rounding differs, at least 95 % of them)."""
    prompts = prompts_of(6, 40, 512) + prompts_of(3, 90, 512, shared=64)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(Path(folder))
        model = ModelConfig(folder=folder, dtype="float32")
        core, _, _ = build(Bench(True, 1e9, Path()), model, SMALL_LIMITS)
        reference, _ = generate(core, prompts, 24)
        core.close()
        eager: dict[str, list[int]] = {}
        for name, changes in {
            "eager": {"enforce_eager": True, "async_scheduling": False},
            "graphs": {"async_scheduling": False},
            "graphs, overlapped": {},
            "cascade, graphs, overlapped": {},
        }.items():
            pays = (lambda self, requests, tokens: tokens >= 64) if "cascade" in name else CascadeRule.pays
            core, info, _ = build(bench, model, SMALL_LIMITS, **changes)
            with patch.object(CascadeRule, "pays", pays):
                if "cascade" in name:
                    generate(core, prompts[-3:], 1, "warm")
                found, _ = generate(core, prompts, 24)
            core.close()
            eager = eager or found
            pairs = [(a, b) for key in reference for a, b in zip(reference[key], found[key], strict=True)]
            with_cpu = sum(a == b for a, b in pairs) / len(pairs)
            same = found == eager or "cascade" in name  # a cascade adds in another order
            yield {
                "run": name, "backend": info.attention_backend, "agreement_with_cpu": with_cpu, "tokens": len(pairs),
                "equals_eager": found == eager, "ok": same and with_cpu >= 0.95,
            }  # fmt: skip


def big_engine(bench: Bench, label: str, changes: dict[str, Any]) -> Iterator[Row]:
    """A model of Qwen2.5-7B's shape with random weights: KV tokens, tokens/s, step time; the cascade with graphs."""
    shape, limits = (TINY, SMALL_LIMITS) if bench.dry else (QWEN_7B, LIMITS)
    vocabulary = int(str(shape["vocab_size"]))
    length, output = (32, 4) if bench.dry else (512, 128)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        started = time.monotonic()
        model = ModelConfig(folder=folder, load_format="dummy")
        core, info, lines = build(bench, model, limits, **changes)
        start_s = round(time.monotonic() - started, 1)
        predicted = predicted_kv_tokens(folder, changes)
    is_comparable = not bench.dry and isinstance(predicted, int)
    error = round(100 * (int(predicted) / info.kv_tokens - 1), 2) if is_comparable else None
    yield {"run": label, "start_s": start_s, "kv_tokens": info.kv_tokens, "predicted": predicted,
           "error_percent": error, "backend": info.attention_backend, "log": lines}  # fmt: skip
    generate(core, prompts_of(2, 32, vocabulary), 4, "warm")
    is_graphs = label == "graphs"
    for count in (1, 2) if bench.dry else (1, 8, 64, 256) if is_graphs else (1, 64):
        tokens, seconds = generate(core, prompts_of(count, length, vocabulary), output, f"{count}-")
        made = sum(map(len, tokens.values()))
        yield {"run": label, "concurrency": count, "output_tokens_per_s": round(made / seconds, 1)}
    yield step_time(bench, core, vocabulary, label)
    if is_graphs:
        yield from shared_prefix(bench, core, vocabulary)
    core.close()


def engine_graphs(bench: Bench) -> Iterator[Row]:
    """The usual way."""
    yield from big_engine(bench, "graphs", {})


def engine_eager(bench: Bench) -> Iterator[Row]:
    """Without graphs."""
    yield from big_engine(bench, "eager", {"enforce_eager": True})


def engine_fp8(bench: Bench) -> Iterator[Row]:
    """With float8 pages."""
    yield from big_engine(bench, "fp8 KV", {"kv_cache_dtype": "fp8"})


def shared_prefix(bench: Bench, core: Any, vocabulary: int) -> Iterator[Row]:
    """Requests over one long cached prefix, the cascade allowed and not."""
    count, shared, output = (3, 64, 4) if bench.dry else (64, 4096, 64)
    for is_allowed in (True, False):
        prompts = prompts_of(count, shared + 32, vocabulary, shared=shared)
        with patch.object(CascadeRule, "pays", CascadeRule.pays if is_allowed else lambda *_: False):
            generate(core, prompts, 1, f"prefix{is_allowed}")  # all prompts are in the cache then: decode alone is left
            tokens, seconds = generate(core, prompts, output, f"cascade{is_allowed}")
        rate = sum(map(len, tokens.values())) / seconds
        name = f"shared {shared}-token prefix, cascade {'allowed' if is_allowed else 'off'}"
        yield {"run": name, "concurrency": count, "output_tokens_per_s": round(rate, 1)}


def step_time(bench: Bench, core: Any, vocabulary: int, label: str) -> Row:
    """Wall time of a decode step of 64 requests over the sum of its kernels' times; the target is 1.2."""
    count, steps = (2, 3) if bench.dry else (64, 50)
    params = SamplingParams(temperature=0, max_tokens=2 * steps + 16, ignore_eos=True)
    for index, prompt in enumerate(prompts_of(count, 48, vocabulary)):
        core.add(Request(f"step{index}", prompt, params))
    for _ in range(4):
        core.step()
    started = time.monotonic()
    for _ in range(steps):
        core.step()
    wall_s = (time.monotonic() - started) / steps
    row: Row = {"run": f"decode step, {label}", "concurrency": count, "step_ms": round(wall_s * 1e3, 3)}
    if not bench.dry:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                core.step()
            torch.cuda.synchronize()
        # One step more or less may fall into the window: 2 % of 50.
        busy_s = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6 / steps
        row |= {"kernels_ms": round(busy_s * 1e3, 3), "overhead": round(wall_s / busy_s, 3) if busy_s else None}
    while core.has_work():
        core.step()
    return row


def predicted_kv_tokens(folder: str, changes: dict[str, Any]) -> int | str:
    """What `kvctl size` says of this GPU; a line of text where it cannot."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "h200-sxm"
    limits = LIMITS
    command = [
        sys.executable, "-m", "kvctl", "size", folder, "--gpu", name, "--json", "--uncalibrated",
        "--max-model-len", str(limits.max_model_len), "--max-num-seqs", str(limits.max_num_seqs),
        "--max-num-batched-tokens", str(limits.max_num_batched_tokens),
        "--kv-cache-dtype", changes.get("kv_cache_dtype", "auto"),
        *(["--enforce-eager"] if changes.get("enforce_eager") else []),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    try:
        return int(json.loads(done.stdout)["capacity"]["kv_tokens"])
    except (ValueError, KeyError, TypeError):
        return f"none: {done.stderr.strip()[-200:]}"
