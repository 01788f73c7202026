"""One question to `size` and its whole answer: the model, the machine, the engine -> bytes, blocks, requests, speed.

Puts the parts together and nothing more; reads no file and prints nothing. Floor 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvctl.errors import ConfigError, ModelNotSupported
from kvctl.model.dtypes import element_bytes, kv_format
from kvctl.model.hardware import HardwareProfile
from kvctl.model.kv_cache_spec import (
    KVCacheSpec,
    KVOptions,
    all_layers_bytes_per_token,
    kv_cache_specs,
    marginal_bytes_per_token,
    request_bytes,
    state_bytes_per_request,
)
from kvctl.model.layer_shape import LayerKind
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_formats import WeightFormat, has_fp8_kv_scales, model_format, named_format
from kvctl.model.weight_size import Parallelism, WeightSize, computed_weight_size, measured_weight_size
from kvctl.sizing.answer_notes import Asked, answer_notes
from kvctl.sizing.blocks import longest
from kvctl.sizing.capacity import Capacity, Limits, Pool, build_pool, capacity, priced
from kvctl.sizing.device_blocks import default_block_tokens, state_alignment
from kvctl.sizing.engine_rules import EngineRules, engine_rules, latent_bytes
from kvctl.sizing.memory import (
    EngineDefaults,
    MemoryBudget,
    Overheads,
    engine_defaults,
    host_memory_budget,
    memory_budget,
)

_CONFIG_STATE_DTYPE = (0, 11, 1)  # from here on vLLM keeps a state in the format that the config names (issue 24280)
UNBOUNDED_LENGTH = 1 << 40  # tokens; the search bound of a model that does not say its longest context


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What safetensors headers say: exact."""

    total_bytes: int
    num_parameters: int
    source: str
    is_gguf: bool = False  # `kvctl serve` makes these into unquantized weights


@dataclass(frozen=True, slots=True)
class SizedModel:
    """A model to size: its shape and where its facts come from."""

    id: str
    shape: ModelShape
    source: str
    files: WeightFiles | None = None
    given: str | None = None  # what a server takes for it; None: its id


@dataclass(frozen=True, slots=True)
class SizeRequest:
    """Every choice of the user; None: the engine's or the model's own default."""

    model: SizedModel
    engine: str = "kvctl"
    parallel: Parallelism = field(default_factory=Parallelism)
    hardware: HardwareProfile | None = None
    total_bytes: int | None = None
    utilization: float | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    block_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool | None = None
    prefix_share: float = 0.0
    learnt: Overheads | None = None
    enforce_eager: bool = False
    context_parallel: int = 1


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    """What was found. `capacity` and `budget` are None without memory to divide."""

    request: SizeRequest
    rules: EngineRules
    defaults: EngineDefaults
    limits: Limits
    dtype: str
    kv_dtype: str
    specs: tuple[KVCacheSpec, ...]  # of the fullest GPU
    all_specs: tuple[KVCacheSpec, ...]  # of every layer, one GPU's share of each
    bytes_per_token: int  # ideal marginal cost, all GPUs' layers, unsplit by tensor parallelism
    bytes_per_token_per_gpu: int
    stored_bytes_per_token_per_gpu: int  # when every attending layer keeps every token
    state_bytes: int | None
    pool: Pool | None
    pool_error: ModelNotSupported | None
    weights: WeightSize | None
    budget: MemoryBudget | None
    capacity: Capacity | None
    capacity_low: Capacity | None
    capacity_high: Capacity | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        """Whether one request of max_model_len fits; None: not asked or not known."""
        return None if self.capacity is None else self.capacity.fits


def size_up(request: SizeRequest) -> SizeAnswer:
    """Answer one question.

    Raises:
        ConfigError: an impossible option or combination.
        ModelNotSupported: memory was given, but what the engine does with this model is not known.
    """
    shape = request.model.shape
    rules = engine_rules(request.engine)
    _validate(request)
    dtype = _resolve_dtype(request, rules)
    own = shape.max_model_len
    max_model_len = request.max_model_len or own or 4096
    has_latent = any(x.kind is LayerKind.MLA for x in shape.layers)
    defaults = engine_defaults(rules, request.hardware, max_model_len, has_latent=has_latent)
    tokens = request.max_num_batched_tokens or defaults.max_num_batched_tokens
    limits = Limits(
        max_model_len,
        tokens,
        request.max_num_seqs or defaults.max_num_seqs,
        request.prefix_caching,
        request.context_parallel,
    )
    kv_dtype = _resolve_kv_dtype(request, rules, shape)
    all_specs = kv_cache_specs(shape, _options(request, rules, shape, dtype, kv_dtype, request.parallel.tensor))
    whole = kv_cache_specs(shape, _options(request, rules, shape, dtype, kv_dtype, 1))
    specs = _stage(all_specs, shape.num_layers, request.parallel.pipeline)
    counted = all_specs if rules.fit_counts_all_stages else specs  # what this version sets against one GPU
    block_size = request.block_size or default_block_tokens(shape, rules, request.hardware, max_model_len)
    alignment = state_alignment(shape, rules, request.hardware, request.prefix_caching)
    pool, pool_error = _pool(specs, rules, block_size, alignment)
    checked = pool  # what the fit check sets against the memory
    if rules.fit_counts_all_stages and request.parallel.pipeline > 1:
        checked, _ = _pool(all_specs, rules, block_size, alignment)
    weights = _weights(request, rules, dtype)
    budget = _budget(request, rules, shape, defaults, limits, weights, dtype)
    kv_bytes = request.kv_bytes if request.kv_bytes is not None else budget.kv.value if budget else None
    caps: list[Capacity | None] = [None, None, None]
    if kv_bytes is not None:
        if pool is None:
            raise pool_error or ModelNotSupported("cannot tell: this model keeps no cache")
        most = max(own or 0, request.max_model_len or 0) or UNBOUNDED_LENGTH
        amounts = [kv_bytes] * 3
        if request.kv_bytes is None and budget is not None:
            amounts = [budget.kv.low, budget.kv.value, budget.kv.high]
        caps = [_capacity(pool, checked or pool, all_specs, amount, limits, most, request) for amount in amounts]
    return SizeAnswer(
        request=request,
        rules=rules,
        defaults=defaults,
        limits=limits,
        dtype=dtype,
        kv_dtype=kv_dtype,
        specs=specs,
        all_specs=all_specs,
        bytes_per_token=marginal_bytes_per_token([priced(x, rules) for x in whole], max_model_len),
        bytes_per_token_per_gpu=marginal_bytes_per_token([priced(x, rules) for x in counted], max_model_len),
        stored_bytes_per_token_per_gpu=all_layers_bytes_per_token(specs),
        state_bytes=state_bytes_per_request(specs),
        pool=pool,
        pool_error=pool_error,
        weights=weights,
        budget=budget,
        capacity=caps[1],
        capacity_low=caps[0],
        capacity_high=caps[2],
        notes=answer_notes(
            shape,
            rules,
            request.parallel,
            pool,
            weights,
            pool_error,
            Asked(request.kv_dtype, request.max_model_len, request.prefix_caching),
        ),
    )


def with_changes(request: SizeRequest, **changes: object) -> SizeRequest:
    """A copy of a question with some choices changed."""
    return replace(request, **changes)  # type: ignore[arg-type]


def _validate(request: SizeRequest) -> None:
    for option, value in (
        ("tensor-parallel-size", request.parallel.tensor),
        ("pipeline-parallel-size", request.parallel.pipeline),
        ("data-parallel-size", request.parallel.data),
        ("block-size", request.block_size),
        ("max-model-len", request.max_model_len),
        ("max-num-seqs", request.max_num_seqs),
        ("max-num-batched-tokens", request.max_num_batched_tokens),
        ("decode-context-parallel-size", request.context_parallel),
    ):
        if value is not None and not 1 <= value <= 1 << 40:
            raise ConfigError(
                f"--{option} is {value:,}",
                hint="Give a whole number of 1 or more, at most 2 to the 40."
                if value > 1
                else "Give a whole number of 1 or more.",
            )
    if request.utilization is not None and not 0 < request.utilization <= 1:
        raise ConfigError(f"--gpu-memory-utilization is {request.utilization}", hint="Give a share over 0, at most 1.")
    if not 0 <= request.prefix_share < 1:
        raise ConfigError(f"--prefix-share is {request.prefix_share}", hint="Give a share of the prompt, 0 to under 1.")
    if request.parallel.tensor % request.context_parallel:
        raise ConfigError(
            f"--decode-context-parallel-size {request.context_parallel} does not divide tp {request.parallel.tensor}",
            hint="It shares the ranks of tensor parallelism.",
        )
    if request.parallel.pipeline > request.model.shape.num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {request.parallel.pipeline} exceeds the model's "
            f"{request.model.shape.num_layers} layers",
            hint="Each stage needs at least one layer.",
        )


def _resolve_dtype(request: SizeRequest, rules: EngineRules) -> str:
    if request.dtype != "auto":
        return request.dtype
    own = request.model.shape.dtype
    if own in ("float32", "fp32") and rules.name != "kvctl":  # engines serve float32 checkpoints in 16 bits
        return "float16"
    return own


def _resolve_kv_dtype(request: SizeRequest, rules: EngineRules, shape: ModelShape) -> str:
    """'auto' is FP8 for DeepSeek V4, and in newer vLLM where the checkpoint carries scales for it; else stays."""
    if request.kv_dtype != "auto":
        return request.kv_dtype
    wants_fp8 = any(x.compress_ratio for x in shape.layers) or (
        rules.takes_checkpoint_kv_dtype and has_fp8_kv_scales(shape.view)
    )
    return "fp8" if wants_fp8 else "auto"


def _options(
    request: SizeRequest, rules: EngineRules, shape: ModelShape, dtype: str, kv_dtype: str, tensor: int
) -> KVOptions:
    fmt = kv_format(kv_dtype, dtype)
    latent = next((x for x in shape.layers if x.kind is LayerKind.MLA), None)
    entry = None
    if latent is not None and fmt.bits >= 8:
        entry = latent_bytes(
            rules,
            entry_elements=latent.key_dim,
            num_heads_per_gpu=max(1, shape.num_attention_heads // tensor),
            element_bytes=fmt.bits // 8,
        )
    state = "float32" if rules.name in ("sglang", "llama.cpp") else None
    if rules.name == "vllm" and () < rules.version < _CONFIG_STATE_DTYPE:
        state = dtype
    return KVOptions(fmt, tensor, "float32" if rules.name == "llama.cpp" else dtype, entry, state)


def _stage(specs: Sequence[KVCacheSpec], num_layers: int, pipeline: int) -> tuple[KVCacheSpec, ...]:
    if pipeline == 1:
        return tuple(specs)
    first = -(-num_layers // pipeline)
    return tuple(s for s in specs if s.layer_index < first)


def _pool(
    specs: Sequence[KVCacheSpec], rules: EngineRules, block_size: int, alignment: int
) -> tuple[Pool | None, ModelNotSupported | None]:
    try:
        return build_pool(specs, rules, block_size, state_align=alignment), None
    except ModelNotSupported as error:
        return None, error


def _weights(request: SizeRequest, rules: EngineRules, dtype: str) -> WeightSize | None:
    shape = request.model.shape
    fmt: WeightFormat
    if request.quantization is not None:
        fmt = named_format(request.quantization, dtype)
    else:
        fmt = model_format(shape.view, dtype)
    files = request.model.files
    if files is not None and files.is_gguf and rules.name == "kvctl" and files.num_parameters:
        unpacked = files.num_parameters * element_bytes(dtype)
        return measured_weight_size(
            shape, unpacked, files.num_parameters, request.parallel, fmt, f"{files.source}, made into {dtype}"
        )
    if files is not None and request.quantization is None:
        return measured_weight_size(shape, files.total_bytes, files.num_parameters, request.parallel, fmt, files.source)
    return computed_weight_size(shape, fmt, request.parallel)


def _budget(
    request: SizeRequest,
    rules: EngineRules,
    shape: ModelShape,
    defaults: EngineDefaults,
    limits: Limits,
    weights: WeightSize | None,
    dtype: str,
) -> MemoryBudget | None:
    hardware = request.hardware
    total = request.total_bytes or (hardware.total_bytes if hardware else None)
    if total is None:
        return None
    if weights is None:
        if request.kv_bytes is not None:
            return None
        raise ModelNotSupported(
            f"cannot tell: the weights of {shape.architecture} cannot be computed from this config",
            hint="Give a folder or hub id with safetensors files, or the KV memory: --kv-cache-memory-bytes 12GiB.",
        )
    if hardware is not None and hardware.is_cpu and rules.name == "kvctl":
        return host_memory_budget(total_bytes=total, weights_bytes=weights.bytes_per_gpu)
    return memory_budget(
        shape,
        rules,
        total_bytes=total,
        utilization=request.utilization or defaults.utilization,
        weights_bytes=weights.bytes_per_gpu,
        num_tokens=limits.max_num_batched_tokens,
        num_rows=limits.max_num_seqs,
        samples=defaults.profiles_sampling,
        tensor_parallel=request.parallel.tensor,
        element_bytes=element_bytes(dtype),
        expert_ranks=request.parallel.data if request.parallel.expert else 1,
        quantized=weights.format_name != dtype,
        eager=request.enforce_eager,
        unified=hardware is not None and hardware.host_link == "unified",
        learnt=request.learnt,
    )


def _capacity(
    pool: Pool,
    checked: Pool,
    all_specs: Sequence[KVCacheSpec],
    kv_bytes: int,
    limits: Limits,
    most: int,
    request: SizeRequest,
) -> Capacity:
    holds_states = request.kv_bytes is None
    found = capacity(pool, kv_bytes, limits, longest_tokens=most, holds_states=holds_states)
    if checked is not pool:
        strict = capacity(checked, kv_bytes, limits, longest_tokens=most, holds_states=holds_states)
        found = replace(
            found,
            fits=strict.fits,
            max_context_tokens=strict.max_context_tokens,
            needed_bytes=strict.needed_bytes,
        )
    return _ideal_capacity(found, all_specs, kv_bytes, most) if pool.rules.name == "ideal" else found


def _ideal_capacity(found: Capacity, specs: Sequence[KVCacheSpec], kv_bytes: int, most: int) -> Capacity:
    """Without blocks a request costs its bytes: windows capped, states once."""
    each = request_bytes(specs, found.max_model_len)
    if each is None:
        return found
    return replace(
        found,
        max_concurrency=max(0, kv_bytes) / max(1, each),
        max_context_tokens=longest(lambda tokens: (request_bytes(specs, tokens) or 0) <= kv_bytes, most),
        fits=each <= kv_bytes,
        needed_bytes=each,
    )
