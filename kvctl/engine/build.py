"""From an EngineConfig to a running EngineCore: read, check, load, measure, allocate.

Knows no process and no server: it imports torch and the core only, so that it also runs where fastapi, msgspec and
the rest are not installed. Everything that can be wrong with a model is found before its weights are loaded. Floor 2.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from kvctl.core.block_pool import BlockPool
from kvctl.core.engine_core import Clock, EngineCore
from kvctl.core.kv_cache_groups import KVCacheGroup, group_layers
from kvctl.core.kv_cache_manager import KVCacheManager
from kvctl.core.pipelined_engine_core import PipelinedEngineCore
from kvctl.core.scheduler import Scheduler
from kvctl.engine.cascade import CascadeRule, device_bytes_per_s
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.engine.decode_graphs import CudaGraphs, DecodeGraphs, graph_sizes
from kvctl.engine.device import (
    amd_arch,
    free_device_bytes,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    set_cpu_threads,
)
from kvctl.engine.json_file import read_json_object
from kvctl.engine.kv_cache import KVCache, allocate_kv_cache
from kvctl.engine.kv_scales import load_kv_scales, scales_for
from kvctl.engine.layers.linear import select_linears
from kvctl.engine.memory_budget import MemoryBudget, cpu_budget, cuda_budget
from kvctl.engine.model_runner import TorchModelRunner
from kvctl.engine.models.decoder import Decoder, WeightSource, build_decoder
from kvctl.engine.models.decoder_config import DecoderConfig
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.models.weight_layout import all_tensors
from kvctl.engine.ops import KVScales, select_ops
from kvctl.engine.profile_steps import run_profile_steps
from kvctl.engine.sampler import Sampler, select_sampling
from kvctl.engine.weights import CheckpointWeights, DummyWeights
from kvctl.errors import OutOfMemory
from kvctl.sizing.kv_plan import (
    KVLayout,
    KVPlan,
    blocks_worth_having,
    longest_fitting_request,
    padding_note,
    plan_kv_cache,
)
from kvctl.sizing.memory import expected_graph_bytes
from kvctl.units import format_bytes, format_count, format_seconds


@dataclass(frozen=True, slots=True)
class _LoadedModel:
    config: DecoderConfig
    decoder: Decoder
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    load_s: float
    kv_scales: Mapping[int, KVScales]
    attention_backend: str
    linear_backend: str
    num_threads: int
    notes: tuple[str, ...]


def build_engine_core(
    config: EngineConfig, clock: Clock, report: Callable[[str], None]
) -> tuple[EngineCore, EngineInfo]:
    """Build everything below the API: model, KV cache, scheduler. `report` gets lines for a person's log.

    Raises:
        ModelNotSupported, ModelBroken: the folder; told within a second, before weights are loaded.
        OutOfMemory: weights or one request of max_model_len tokens do not fit.
        ConfigError: the device or dtype that was asked for cannot be had.
    """
    loaded = _load_model(config, report)
    groups = group_layers(loaded.config.windows)
    kv_dtype = resolve_kv_dtype(config.device.kv_cache_dtype, loaded.dtype, amd_arch(loaded.device))
    loaded = replace(loaded, kv_scales=scales_for(kv_dtype, loaded.kv_scales))
    layout = KVLayout(
        groups=groups,
        block_size=config.cache.block_size,
        page_bytes=2
        * loaded.config.num_kv_heads
        * config.cache.block_size
        * loaded.config.head_dim
        * kv_dtype.itemsize,
        in_flight_tokens=config.scheduler.max_num_batched_tokens,
    )
    plan, lines = _plan_cache(config, loaded, layout, kv_dtype)
    config = replace(config, scheduler=replace(config.scheduler, max_model_len=plan.max_model_len))
    try:
        kv_cache = allocate_kv_cache(
            groups,
            num_blocks=plan.num_blocks,
            block_size=config.cache.block_size,
            num_kv_heads=loaded.config.num_kv_heads,
            head_dim=loaded.config.head_dim,
            dtype=kv_dtype,
            device=loaded.device,
            scales=loaded.kv_scales,
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(
            f"a KV cache of {format_bytes(plan.kv_cache_bytes)} could not be allocated",
            hint="Lower --kv-cache-memory-bytes or --num-gpu-blocks-override.",
        ) from error
    for line in lines:
        report(line)
    runner = TorchModelRunner(
        loaded.decoder,
        kv_cache,
        Sampler(
            loaded.config.vocab_size,
            loaded.device,
            config.model.seed,
            select_sampling(loaded.device, config.device.cpu_kernels, loaded.num_threads),
        ),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.scheduler.max_model_len,
        num_groups=len(groups),
        device=loaded.device,
        decode_graphs=_capture_decode_graphs(config, loaded, kv_cache, groups, report),
        cascade=_cascade_rule(loaded, groups, layout.page_bytes // layout.block_size),
    )
    pool = BlockPool(plan.num_blocks, config.cache.enable_prefix_caching)
    manager = KVCacheManager(pool, config.cache, groups, max_step_tokens=config.scheduler.max_num_batched_tokens)
    make_core = PipelinedEngineCore if config.async_scheduling else EngineCore
    core = make_core(Scheduler(config.scheduler, manager), runner, clock)
    return core, _info(config, loaded, plan, kv_cache, lines)


def _capture_decode_graphs(
    config: EngineConfig,
    loaded: _LoadedModel,
    kv_cache: KVCache,
    groups: Sequence[KVCacheGroup],
    report: Callable[[str], None],
) -> DecodeGraphs | None:
    """Graphs for decode steps on a GPU whose kernels can be captured; None: run every step eagerly."""
    if not _captures_graphs(config, loaded):
        return None
    free_before = free_device_bytes(loaded.device)
    started_s = time.monotonic()
    sizes = graph_sizes(config.scheduler.max_num_seqs)
    with torch.inference_mode():
        graphs = DecodeGraphs(
            loaded.decoder,
            kv_cache.layers,
            CudaGraphs(loaded.device),
            sizes=sizes,
            max_blocks=-(-config.scheduler.max_model_len // kv_cache.block_size) + 1,
            block_size=kv_cache.block_size,
            num_groups=len(groups),
            device=loaded.device,
            cascade_groups=_cascade_groups(loaded, groups),
        )
    taken = (free_before or 0) - (free_device_bytes(loaded.device) or 0)
    report(
        f"Captured {graphs.num_graphs} decode graphs, up to {sizes[-1]} requests, in "
        f"{format_seconds(time.monotonic() - started_s)}; they take {format_bytes(max(0, taken))}"
    )
    return graphs


def _captures_graphs(config: EngineConfig, loaded: _LoadedModel) -> bool:
    on_gpu = loaded.device.type == "cuda" and loaded.attention_backend == "triton"
    return on_gpu and not config.device.enforce_eager


def _cascade_rule(loaded: _LoadedModel, groups: Sequence[KVCacheGroup], token_bytes: int) -> CascadeRule | None:
    """When a shared prefix is read once; `token_bytes`: keys and values of a token in one layer."""
    found = _cascade_groups(loaded, groups)
    if not found:
        return None
    name = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else ""
    return CascadeRule(frozenset(found), token_bytes, device_bytes_per_s(name))


def _cascade_groups(loaded: _LoadedModel, groups: Sequence[KVCacheGroup]) -> list[int]:
    """The groups whose attention reads a long shared prefix once: those without a window, with kernels that can."""
    if loaded.attention_backend != "triton":
        return []
    return [index for index, group in enumerate(groups) if group.window_tokens is None]


@contextmanager
def _log_of_kernels_to(report: Callable[[str], None]) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report(record.getMessage())

    logger, handler = logging.getLogger("kvctl_kernels"), Handler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _load_model(config: EngineConfig, report: Callable[[str], None]) -> _LoadedModel:
    started_s = time.monotonic()
    folder = Path(config.model.folder)
    raw = read_json_object(folder / "config.json")
    model_config = parse_decoder_config(raw)
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.model.dtype, raw, allows_float16=model_config.allows_float16)
    num_threads = set_cpu_threads(config.device.num_threads)
    weights: WeightSource
    if config.model.load_format == "dummy":
        weights = DummyWeights(model_config, dtype, device, config.model.seed)
    else:
        weights = CheckpointWeights(folder, model_config, dtype, device)
    weight_bytes = sum(tensor.num_elements for tensor in all_tensors(model_config)) * dtype.itemsize
    free_bytes = free_device_bytes(device)
    if free_bytes is not None and weight_bytes > free_bytes:
        raise _no_room_for_weights(weight_bytes, f"{format_bytes(free_bytes)} are free on {device}")
    with _log_of_kernels_to(report):  # the first start on a machine compiles them, which takes a while
        ops = select_ops(device, dtype, config.device.cpu_kernels, num_threads)
    linears = select_linears(device, dtype, config.device.cpu_kernels, num_threads)
    try:
        decoder = build_decoder(
            model_config,
            weights,
            ops,
            linears,
            dtype=dtype,
            device=device,
            num_positions=config.scheduler.max_model_len + 1,
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _no_room_for_weights(weight_bytes, f"{device} has no more to give") from error
    if ops.name == "native":
        # Those kernels have threads of their own; what is left to torch is small, and its OpenMP regions stall for
        # milliseconds whenever another process takes a core.
        torch.set_num_threads(1)
    load_s = time.monotonic() - started_s
    kind = "random weights for " if config.model.load_format == "dummy" else ""
    report(
        f"Loaded {kind}{model_config.architecture} from {folder} ({format_bytes(weight_bytes)}, "
        f"{str(dtype).removeprefix('torch.')}) in {format_seconds(load_s)}"
    )
    notes = tuple(dict.fromkeys(reason for reason in (ops.reason, linears.reason) if reason))
    for note in notes:
        report(note)
    return _LoadedModel(
        model_config,
        decoder,
        dtype,
        device,
        weight_bytes,
        load_s,
        load_kv_scales(
            weights.find, model_config.name_prefix, model_config.num_layers, model_config.num_kv_heads, device
        ),
        ops.name,
        linears.name,
        num_threads,
        notes,
    )


def _no_room_for_weights(weight_bytes: int, what_there_is: str) -> OutOfMemory:
    return OutOfMemory(
        f"the weights need {format_bytes(weight_bytes)}, {what_there_is}",
        hint="Use a smaller model or --dtype bfloat16, or free memory.",
    )


def _plan_cache(
    config: EngineConfig, loaded: _LoadedModel, layout: KVLayout, kv_dtype: torch.dtype
) -> tuple[KVPlan, list[str]]:
    """Decide the number of blocks; returns the plan and the lines that explain it."""
    limits = config.scheduler
    on_cpu = loaded.device.type == "cpu"
    budget: MemoryBudget
    if on_cpu:
        budget = cpu_budget(config.device, loaded.weight_bytes)
    else:
        graph_bytes = 0
        if _captures_graphs(config, loaded):
            graph_bytes = expected_graph_bytes(loaded.config.num_layers, limits.max_num_seqs)
        budget = cuda_budget(
            config.device,
            loaded.weight_bytes,
            loaded.device,
            partial(
                run_profile_steps,
                loaded.decoder,
                loaded.device,
                layout,
                limits,
                kv_dtype,
                loaded.kv_scales,
                config.device.cpu_kernels,
            ),
            graph_bytes=graph_bytes,
        )
    lines = list(budget.lines)
    available = budget.kv_cache_bytes
    override = config.device.num_gpu_blocks_override
    is_default = config.device.kv_cache_memory_bytes is None and override is None
    if on_cpu and is_default:
        most = blocks_worth_having(layout, limits.max_model_len, limits.max_num_seqs) * layout.block_bytes
        available = min(available, most)
    if override is not None:
        computed = available // layout.block_bytes
        lines.append(f"Overriding num_gpu_blocks={computed} with num_gpu_blocks_override={override}")
    max_model_len = limits.max_model_len
    if config.fit_max_model_len:
        num_blocks = available // layout.block_bytes if override is None else override
        max_model_len = longest_fitting_request(layout, num_blocks, max_model_len) or max_model_len
        if max_model_len < limits.max_model_len:
            lines.append(
                f"Auto-fit max_model_len: reduced from {limits.max_model_len} to {max_model_len} to fit the cache"
            )
    plan = plan_kv_cache(layout, max_model_len, available_bytes=available, num_blocks_override=override)
    if budget.ceiling_bytes is not None and plan.kv_cache_bytes > budget.ceiling_bytes:
        raise OutOfMemory(
            f"a KV cache of {format_bytes(plan.kv_cache_bytes)} was asked for, "
            f"{format_bytes(budget.ceiling_bytes)} are free",
            hint="Lower --kv-cache-memory-bytes or --num-gpu-blocks-override, or free memory.",
        )
    lines.append(
        f"KV blocks: {format_count(plan.num_blocks)} of {layout.block_size} tokens, "
        f"{format_bytes(layout.block_bytes)} each, {format_bytes(plan.kv_cache_bytes)} in all"
    )
    padding = padding_note(layout.groups)
    if padding is not None:
        lines.append(padding)
    lines.append(plan.describe("KV cache" if on_cpu else "GPU KV cache"))
    return plan, lines


def _info(config: EngineConfig, loaded: _LoadedModel, plan: KVPlan, kv_cache: KVCache, lines: list[str]) -> EngineInfo:
    return EngineInfo(
        model_folder=config.model.folder,
        architecture=loaded.config.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        attention_backend=loaded.attention_backend,
        linear_backend=loaded.linear_backend,
        num_blocks=plan.num_blocks,
        block_size=config.cache.block_size,
        kv_cache_bytes=kv_cache.total_bytes,
        kv_cache_dtype=str(kv_cache.layers[0].k_cache.dtype).removeprefix("torch."),
        weight_bytes=loaded.weight_bytes,
        kv_tokens=plan.capacity_tokens,
        max_concurrency=plan.max_concurrency,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        num_threads=loaded.num_threads,
        load_s=loaded.load_s,
        notes=(*loaded.notes, *lines),
    )
