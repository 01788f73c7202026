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


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a calibration has learnt about this machine, in bytes; None: not learnt."""

    total_bytes: int | None = None
    activation_bytes: int | None = None
    graph_bytes: int | None = None
    other_bytes: int | None = None
    unexplained_bytes: int | None = None  # what the prediction for the calibrating run missed


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
    rules: EngineRules, hardware: HardwareProfile | None, max_model_len: int, *, world_size: int = 1
) -> EngineDefaults:
    """Utilisation, tokens per step and requests at once.

    Source: vLLM's EngineArgs: 0.9 (0.92 from 0.21), 2048 or 8192 tokens by GPU, 256 or 1024 requests; before 0.8 a
    step took a whole prompt (max_model_len) unless that was over 32,768. SGLang 0.88 of the total; TensorRT-LLM 0.9
    of what is free; llama.cpp has no such share.
    """
    if rules.name == "vllm":
        big = hardware is not None and hardware.total_bytes >= BIG_GPU_BYTES and "a100" not in hardware.id
        if rules.is_v0:
            return EngineDefaults(0.9, 2048 if max_model_len > 32768 else max(2048, max_model_len), 256)
        modern = not rules.version or rules.version >= (0, 10)
        utilization = 0.92 if not rules.version or rules.version >= (0, 21) else 0.9
        return EngineDefaults(utilization, 8192 if big else 2048, 1024 if big and modern else 256)
    if rules.name == "kvctl":
        return EngineDefaults(0.92, 2048, 256)
    if rules.name == "sglang":
        return EngineDefaults(0.88, 8192, 256)
    if rules.name == "trtllm":
        return EngineDefaults(0.9, 8192, 256)
    return EngineDefaults(1.0, 2048, 1 if rules.name == "llama.cpp" else 256)


_LOGIT_BYTES = (18, 33, 40)  # per sampled row and vocabulary entry: logits, float32 copy, sort, probabilities
_HIDDEN_COPIES = 4  # residual, normed, attention in and out
_SPREAD = (0.7, 1.0, 1.6)  # of the layer part, over the logs that print it


def activation_bytes(
    shape: ModelShape, *, num_tokens: int, num_rows: int, tensor_parallel: int, element_bytes: int
) -> Range:
    """Peak activations of a profiling step: one layer's widest moment, and sampling of `num_rows` rows.

    Fitted to the `activation_gib` lines of seven logs (phi-4, phi-4-mini, Qwen3-4B, Qwen2.5-7B, Llama 3.2 3B,
    Qwen2 0.5B, an 8B VLM): 18 to 40 bytes per logit, the layer part within 0.7 to 1.6.
    """
    view = shape.view
    inner = view.get("intermediate_size") or view.get("moe_intermediate_size") or 4 * shape.hidden_size
    if view.get("num_experts"):
        chosen = view.get("num_experts_per_tok") or 1
        expert = view.get("moe_intermediate_size") or inner
        inner = max(int(inner) if view.get("first_k_dense_replace") else 0, int(expert) * int(chosen))
        hidden = shape.hidden_size * (_HIDDEN_COPIES + int(chosen))  # one routed copy per chosen expert
    else:
        hidden = shape.hidden_size * _HIDDEN_COPIES
    query = shape.num_attention_heads * next((x.key_dim for x in shape.layers if x.num_kv_heads > 1), 0)
    widest = max(3 * int(inner) // tensor_parallel, 3 * query // tensor_parallel) + hidden
    layer = num_tokens * widest * element_bytes
    logits = min(num_rows, num_tokens) * shape.vocab_size
    low, value, high = (int(layer * f + logits * b) for f, b in zip(_SPREAD, _LOGIT_BYTES, strict=True))
    vision = _vision_bytes(shape)
    return Range(low, value + vision, high + 3 * vision)


def _vision_bytes(shape: ModelShape) -> int:
    """A profiled image batch of a vision-language model. Only its order of magnitude is pinned (0.2 to 1 GiB)."""
    return 300 * MIB if isinstance(shape.view.outer.get("vision_config"), dict) else 0


def graph_bytes(shape: ModelShape, *, tensor_parallel: int, max_num_seqs: int) -> Range:
    """CUDA graphs, captured after the KV cache is sized (before vLLM 0.21) or estimated into the budget (since).

    0.17 to 1.44 GiB printed over ten logs, growing with layers and the capture batch; negative prints are noise.
    """
    per_layer = 9 * MIB if max_num_seqs > 256 else 6 * MIB
    value = 120 * MIB + per_layer * shape.num_layers
    return Range(value // 3, value, int(value * 2.8))


def other_bytes(rules: EngineRules, *, tensor_parallel: int, unified: bool) -> Range:
    """The context beyond PyTorch's reach: 0.01 to 0.14 GiB on one GPU; NCCL adds 0.35 to 2.5 GiB on several."""
    if unified:
        return Range(200 * MIB, 1000 * MIB, 4 * GIB)
    if tensor_parallel == 1:
        return Range(10 * MIB, 90 * MIB, 400 * MIB)
    return Range(300 * MIB, 800 * MIB, int(2.5 * GIB))


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
        num_rows=num_rows,
        tensor_parallel=tensor_parallel,
        element_bytes=element_bytes,
    )
    if known.activation_bytes is not None:
        activation = _learnt(known.activation_bytes)
    graphs = Range(0, 0, 0)
    if not eager:
        graphs = graph_bytes(shape, tensor_parallel=tensor_parallel, max_num_seqs=num_rows)
        if known.graph_bytes is not None:
            graphs = _learnt(known.graph_bytes)
    other = other_bytes(rules, tensor_parallel=tensor_parallel, unified=unified)
    if known.other_bytes is not None:
        other = _learnt(known.other_bytes)
    inside = activation + other + (graphs if rules.estimates_graphs else Range(0, 0, 0))
    shift = known.unexplained_bytes or 0
    left = requested - weights_bytes - shift
    weight_slack = int(weights_bytes * 0.015)  # padding, buffers and repacked formats over the counted parameters
    if known.unexplained_bytes is not None:
        slack = int(0.01 * total)
        kv = Range(left - inside.value - slack, left - inside.value, left - inside.value + slack)
    else:
        kv = Range(left - inside.high - weight_slack, left - inside.value, left - inside.low + weight_slack // 3)
    return MemoryBudget(total, requested, weights_bytes, activation, graphs, other, kv)


def _learnt(n_bytes: int) -> Range:
    return Range(int(n_bytes * 0.95), n_bytes, int(n_bytes * 1.05))
