"""From what was asked for and what the model says to the engine's configuration, with vLLM's defaults.

Knows no HTTP. Imports no torch: whether there is a GPU, and how large, is asked of the driver. Floor 3.
Source of the defaults: serving_conventions.md section 3 (vLLM 0.33): GPUs of 160 GiB or more 16,384 tokens and 1,024
requests, of 70 GiB or more 8,192 and 1,024 (256 on A100), others 2,048 and 256; CPU 2,048 and 128. Different here: a
step on a CPU takes 512 tokens. Its arithmetic is full from some 64 rows on (scripts/bench_cpu_kernels.py), so a larger
step yields no more tokens per second; it only lets running streams, and prompts in the queue, wait for all of it.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from kvctl.core.config import SchedulerConfig
from kvctl.engine.chat_template import ChatTemplate
from kvctl.engine.config import DeviceConfig, EngineConfig, ModelConfig
from kvctl.engine.model_source import ModelFacts
from kvctl.errors import ConfigError, InvalidRequest
from kvctl.server.config import AUTO_LENGTH, ModelOptions, SchedulerOptions, ServeConfig
from kvctl.server.sampling_defaults import SamplingDefaults
from kvctl.units import GIB, MIB

_NVIDIA_DEVICE: Final = Path("/dev/nvidiactl")
_DRIVER_TIMEOUT_S: Final = 5.0
CPU_BATCHED_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Gpu:
    """The first GPU, as its driver describes it."""

    name: str
    memory_bytes: int


def find_gpu(device: DeviceConfig) -> Gpu | None:
    """Return the GPU the engine will use; None where it will use the CPU."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if device.device == "cpu" or is_hidden or not _NVIDIA_DEVICE.exists() or _torch_is_cpu_only():
        return None
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpu("unknown", 0)
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True).stdout
        name, _, mebibytes = answer.strip().partition(",")
        return Gpu(name.strip(), int(mebibytes) * MIB)
    except (OSError, ValueError, subprocess.SubprocessError):
        return Gpu("unknown", 0)


def _torch_is_cpu_only() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def default_limits(gpu: Gpu | None) -> tuple[int, int]:
    """Return (max_num_batched_tokens, max_num_seqs) for a device."""
    if gpu is None:
        return CPU_BATCHED_TOKENS, 128
    if gpu.memory_bytes >= 70 * GIB:
        batched = 16_384 if gpu.memory_bytes >= 160 * GIB else 8192
        return batched, 256 if "a100" in gpu.name.lower() else 1024
    return 2048, 256


def build_scheduler_config(asked: SchedulerOptions, max_model_len: int, gpu: Gpu | None) -> SchedulerConfig:
    """Fill in what was not asked for, clipped to what can be of use.

    Raises:
        ConfigError: what was asked for contradicts itself.
    """
    batched_default, seqs_default = default_limits(gpu)
    if asked.performance_mode == "throughput":
        batched_default, seqs_default = 2 * batched_default, 2 * seqs_default
    elif asked.performance_mode == "interactivity" and gpu is None:
        batched_default //= 2
    if not asked.enable_chunked_prefill:
        batched_default = max(batched_default, max_model_len)
    seqs, batched = asked.max_num_seqs, asked.max_num_batched_tokens
    if seqs is None:
        seqs = seqs_default if batched is None else min(seqs_default, batched)
    if batched is None:
        batched = max(min(batched_default, seqs * max_model_len), seqs)
    return SchedulerConfig(
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        policy=asked.policy,
        enable_chunked_prefill=asked.enable_chunked_prefill,
        long_prefill_token_threshold=asked.long_prefill_token_threshold,
        scheduler_reserve_full_isl=asked.reserve_full_isl,
        watermark=asked.watermark,
    )


def choose_max_model_len(asked: int | None, facts: ModelFacts) -> int:
    """Return the longest request, prompt and output; with `AUTO_LENGTH` the engine lowers it to what fits.

    Raises:
        ConfigError: more than the model was made for.
    """
    if asked is None or asked == AUTO_LENGTH:
        return facts.max_model_len
    if asked > facts.max_model_len:
        raise ConfigError(
            f"--max-model-len {asked} is over the model's own length of {facts.max_model_len}",
            hint="Beyond it the answers turn to nonsense; give at most that many.",
        )
    return asked


def build_engine_config(config: ServeConfig, facts: ModelFacts, folder: Path) -> EngineConfig:
    """Build what the engine process is told.

    Raises:
        ConfigError: an impossible value or combination.
    """
    max_model_len = choose_max_model_len(config.model.max_model_len, facts)
    return EngineConfig(
        model=ModelConfig(str(folder), config.model.dtype, config.model.load_format, config.model.seed),
        scheduler=build_scheduler_config(config.scheduler, max_model_len, find_gpu(config.device)),
        cache=config.cache,
        device=config.device,
        async_scheduling=config.scheduler.async_scheduling,
        fit_max_model_len=config.model.max_model_len == AUTO_LENGTH,
    )


def read_sampling_defaults(model: ModelOptions, facts: ModelFacts) -> SamplingDefaults:
    """Read what the model's authors recommend, and what the operator overrides.

    Raises:
        ConfigError: a file that cannot be read, or an impossible value.
    """
    if model.generation_config == "auto":
        generation_config: dict[str, Any] = facts.generation_config
    elif model.generation_config == "vllm":
        generation_config = {}
    else:
        path = Path(model.generation_config)
        path = path / "generation_config.json" if path.is_dir() else path
        try:
            generation_config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--generation-config: {path} cannot be read: {error}", hint="Give auto, vllm, a folder or a file."
            ) from None
        if not isinstance(generation_config, dict):
            raise ConfigError(f"--generation-config: {path} holds no JSON object", hint="Give another file.")
    return SamplingDefaults.from_generation_config(generation_config | dict(model.override_generation_config))


def read_chat_template(asked: str | None) -> str | None:
    """Return the Jinja text of --chat-template: a file's content, or the text itself.

    Raises:
        ConfigError: neither a file nor a template, or one that cannot be compiled.
    """
    if asked is None:
        return None
    text = asked
    if "{" not in asked and "\n" not in asked:
        try:
            text = Path(asked).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--chat-template: {asked} cannot be read: {error}", hint="Give a file, or the template itself."
            ) from None
    try:
        ChatTemplate({"default": text})
    except InvalidRequest as error:
        raise ConfigError(f"--chat-template: {error.message}", hint="Repair it, or leave the option out.") from None
    return text
