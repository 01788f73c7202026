"""The memory of one GPU: weights, activations, graphs, the rest, and what is left for KV - each as a range.

Knows a profile's total, an engine's switches and a model's widths. The constants are fits to printed server logs
(tests/data/sizing), each with its spread; a calibration of the user's own machine replaces them. Floor 1.
"""

from dataclasses import dataclass

from kvctl.model.hardware import HardwareProfile
from kvctl.model.model_shape import ModelShape
from kvctl.sizing.engine_rules import EngineRules
from kvctl.units import GIB, MIB

BIG_GPU_BYTES = 70 * GIB  # vLLM's own mark: from here on (A100 left out) its defaults are larger

HUGE_GPU_BYTES = 160 * GIB  # the same for its newest versions


@dataclass(frozen=True, slots=True)
class Range:
    """A number of bytes with the least and the most that logs have shown."""

    low: int
    value: int
    high: int

    def __add__(self, other: "Range") -> "Range":
        return Range(self.low + other.low, self.value + other.value, self.high + other.high)


@dataclass(frozen=True, slots=True)
class EngineDefaults:
    """What an engine chooses when the user does not say."""

    utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int
    profiles_sampling: bool = True  # whether the step that measures memory samples too


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a calibration has learnt about this machine; None: not learnt.

    `overhead_factor`: real overheads (all that is neither weights nor KV) over the predicted ones; `weight_factor`
    the same for weights, of the model that the calibration ran.
    """

    total_bytes: int | None = None
    overhead_factor: float | None = None
    weight_factor: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """One GPU's memory. `kv` may be negative: then the weights and overheads alone do not fit."""

    total_bytes: int
    requested_bytes: int
    weights_bytes: int
    activation: Range
    graphs: Range
    other: Range
    kv: Range


def engine_defaults(
    rules: EngineRules, hardware: HardwareProfile | None, max_model_len: int, *, has_latent: bool = False
) -> EngineDefaults:
    """Utilisation, tokens per step and requests at once.

    Source: vLLM's EngineArgs: 0.9 (0.92 from 0.21); 2048, 8192 or (newest) 16384 tokens by GPU; 256 or 1024 requests.
    Before 0.8 a step took a whole prompt (max_model_len); from 0.5.4 on one over 32,768 went in chunks of 512 (2,048
    from 0.6.5 on), unless with MLA, and no token was sampled (issue 10517: 0.06 GiB of activations for chunks).
    SGLang: 0.88 of the total; TensorRT-LLM: 0.9 of what is free; llama.cpp has no such share.
    """
    if rules.name == "vllm":
        big = hardware is not None and hardware.total_bytes >= BIG_GPU_BYTES and "a100" not in hardware.id
        if rules.is_v0:
            if rules.version >= (0, 5, 4) and max_model_len > 32768 and not has_latent:
                return EngineDefaults(0.9, 2048 if rules.version >= (0, 6, 5) else 512, 256, profiles_sampling=False)
            return EngineDefaults(0.9, max(2048, max_model_len), 256)
        modern = not rules.version or rules.version >= (0, 10)
        utilization = 0.92 if not rules.version or rules.version >= (0, 21) else 0.9
        huge = hardware is not None and hardware.total_bytes >= HUGE_GPU_BYTES and utilization == 0.92
        tokens = 16384 if huge else 8192 if big else 2048
        return EngineDefaults(utilization, tokens, 1024 if big and modern else 256)
    if rules.name == "kvctl":
        return EngineDefaults(0.92, 2048, 256)
    if rules.name == "sglang":
        return EngineDefaults(0.88, 8192, 256)
    if rules.name == "trtllm":
        return EngineDefaults(0.9, 8192, 256)
    if rules.name == "llama.cpp":
        return EngineDefaults(1.0, 512, 1)  # n_ubatch, n_parallel
    return EngineDefaults(1.0, 2048, 256)


_PLAIN_SLACK = 0.015  # padding and buffers over the counted weights
_QUANTIZED_SLACK = 0.04  # and layers that a checkpoint left unquantized, repacked formats
CALIBRATED_SLACK = 0.01  # of the GPU's memory: what runs of one machine differ by
# Bytes per sampled row and vocabulary entry. Sorting for top-k/top-p took 29 to 48 (logs of 0.8 to 0.13); samplers
# without a sort take 15 to 34 (logs of 0.18 to 0.24), as do early images that bring FlashInfer's (log h100-8b-image).
# The ends carry a margin of 15 % over what few logs have shown.
_LOGIT_BYTES_SORTED = (13, 38, 55)
_LOGIT_BYTES = (13, 19, 39)
_MOE_CHUNK_TOKENS = 32768  # tokens that one fused MoE call takes at most. Source: VLLM_FUSED_MOE_CHUNK_SIZE
_HIDDEN_COPIES = 4  # residual, normed, attention in and out
_SPREAD = (0.7, 1.0, 1.6)  # of the layer part, over the logs that print it


def activation_bytes(
    shape: ModelShape,
    *,
    num_tokens: int,
    num_rows: int,
    tensor_parallel: int,
    element_bytes: int,
    moe_tokens: int | None = None,
    logit_bytes: tuple[int, int, int] = _LOGIT_BYTES,
) -> Range:
    """Peak activations of a profiling step: the larger of one layer's widest moment and the sampling of `num_rows`.

    `moe_tokens`: tokens that an expert layer sees at once: more than `num_tokens` when data-parallel ranks share
    experts, fewer when the engine cuts a long step.
    Fitted to the `activation_gib` lines of the logs (phi-4, phi-4-mini, Qwen3-4B, Qwen2.5-7B, Llama 3.2 3B twice,
    Qwen2 0.5B): the layer part is 3 MLP widths and 4 hidden widths per token, within 0.7
    to 1.6 (Qwen3-4B of 10,000 tokens and one row: 0.74 GiB printed, 0.73 computed).
    """
    view = shape.view
    hidden = shape.hidden_size
    inner = view.count("intermediate_size") or view.count("moe_intermediate_size") or 4 * hidden
    query = shape.num_attention_heads * next((x.key_dim for x in shape.layers if x.num_kv_heads > 1), 0)
    widest = 3 * max(inner, query) // tensor_parallel
    elements = num_tokens * (widest + _HIDDEN_COPIES * hidden)
    if view.count("num_experts"):
        chosen = view.count("num_experts_per_tok") or 1
        expert = view.count("moe_intermediate_size") or inner
        routed = (moe_tokens or num_tokens) * chosen * (3 * expert // tensor_parallel + hidden)
        elements = max(elements, routed + num_tokens * _HIDDEN_COPIES * hidden)
    layer = elements * element_bytes
    logits = min(num_rows, num_tokens) * shape.vocab_size
    kept = num_tokens * shape.hidden_size * element_bytes  # the hidden states that sampling selects its rows from
    low, value, high = (max(int(layer * f), kept + logits * b) for f, b in zip(_SPREAD, logit_bytes, strict=True))
    vision = _vision_bytes(shape)
    return Range(low, value + vision, high + 3 * vision)


def _vision_bytes(shape: ModelShape) -> int:
    """A profiled image batch of a vision-language model. Only its order of magnitude is pinned (0.2 to 1 GiB)."""
    return 300 * MIB if isinstance(shape.view.outer.get("vision_config"), dict) else 0


def expected_graph_bytes(num_layers: int, max_num_seqs: int) -> int:
    """What the CUDA graphs of a model take, as a single number; `kvctl serve` sets it aside on a GPU."""
    return 120 * MIB + (9 * MIB if max_num_seqs > 256 else 6 * MIB) * num_layers


def graph_bytes(shape: ModelShape, *, tensor_parallel: int, max_num_seqs: int) -> Range:
    """CUDA graphs, captured after the KV cache is sized (before vLLM 0.21) or estimated into the budget (since).

    0.17 to 1.44 GiB printed over ten logs, growing with layers and the capture batch; negative prints are noise.
    """
    value = expected_graph_bytes(shape.num_layers, max_num_seqs)
    return Range(value // 3, value, int(value * 2.8))


def other_bytes(rules: EngineRules, *, ranks: int, unified: bool) -> Range:
    """The context beyond PyTorch's reach: 0.01 to 0.14 GiB on one GPU; NCCL adds 0.35 to 2.5 GiB on several.

    vLLM's V0 counted more. Before 0.7 the CUDA context and whatever else was on the GPU: 0.35 and 1.79 GiB on one, and
    on several 1.8 to 3.4 for each (issue 10517, pull request 10511, logs of 2031, 5248 and phi3-mini-128k-tp4). In 0.7
    2.53 and 7.16 GiB on eight (logs of R1).
    """
    if rules.is_v0 and rules.version < (0, 7):
        return Range(10 * MIB, 350 * MIB, 2 * GIB) if ranks == 1 else _each(ranks, 300, 2000, 3600)
    if rules.is_v0 and ranks > 1:
        return _each(ranks, 150, 500, 1000)
    if unified:
        return Range(200 * MIB, 1000 * MIB, 4 * GIB)
    if ranks == 1:
        return Range(10 * MIB, 90 * MIB, 400 * MIB)
    return Range(300 * MIB, 800 * MIB, int(2.5 * GIB))


def _each(ranks: int, *mib: int) -> Range:
    return Range(*(ranks * amount * MIB for amount in mib))


def memory_budget(
    shape: ModelShape,
    rules: EngineRules,
    *,
    total_bytes: int,
    utilization: float,
    weights_bytes: int,
    num_tokens: int,
    num_rows: int,
    tensor_parallel: int,
    element_bytes: int,
    samples: bool = True,
    expert_ranks: int = 1,
    quantized: bool = False,
    eager: bool = False,
    unified: bool = False,
    learnt: Overheads | None = None,
) -> MemoryBudget:
    """Subtract what is known from what was asked for.

    Source of the order: vLLM's gpu_worker (requested - weights - non-torch - activation peak, and since 0.21 - the
    CUDA graph estimate).
    """
    known = learnt or Overheads()
    total = known.total_bytes or total_bytes
    requested = int(total * utilization)
    activation = activation_bytes(
        shape,
        num_tokens=num_tokens,
        num_rows=num_rows if samples else 0,
        tensor_parallel=tensor_parallel,
        element_bytes=element_bytes,
        moe_tokens=min(num_tokens * expert_ranks, _MOE_CHUNK_TOKENS),
        logit_bytes=_LOGIT_BYTES_SORTED if rules.sorts_logits else _LOGIT_BYTES,
    )
    graphs = Range(0, 0, 0)
    if not eager:
        graphs = graph_bytes(shape, tensor_parallel=tensor_parallel, max_num_seqs=num_rows)
    other = other_bytes(rules, ranks=tensor_parallel * expert_ranks, unified=unified)
    inside = activation + other + (graphs if rules.estimates_graphs else Range(0, 0, 0))
    if known.weight_factor is not None:
        weights_bytes = int(weights_bytes * known.weight_factor)
    left = requested - weights_bytes
    if known.overhead_factor is not None:
        value = left - int(inside.value * known.overhead_factor)
        slack = int(CALIBRATED_SLACK * total)
        kv = Range(value - slack, value, value + slack)
    else:
        slack = int(weights_bytes * (_QUANTIZED_SLACK if quantized else _PLAIN_SLACK))
        kv = Range(left - inside.high - slack, left - inside.value, left - inside.low + slack // 2)
    return MemoryBudget(total, requested, weights_bytes, activation, graphs, other, kv)


CPU_SHARE = 0.4  # of what is free with the weights loaded; the rule of `kvctl serve` on a CPU
CPU_LIMIT_BYTES = 4 * GIB


def host_memory_budget(*, total_bytes: int, weights_bytes: int) -> MemoryBudget:
    """The KV cache that `kvctl serve` takes of a CPU's memory: a share of what is free, up to a limit."""
    free = total_bytes - weights_bytes
    value = min(CPU_LIMIT_BYTES, int(free * CPU_SHARE)) if free > 0 else free
    low = value if value == CPU_LIMIT_BYTES else min(value, int(value * 0.8))
    nothing = Range(0, 0, 0)
    return MemoryBudget(total_bytes, total_bytes, weights_bytes, nothing, nothing, nothing, Range(low, value, value))
