"""How fast: a roofline over weights, KV cache and link, with stated efficiencies and the error band they give.

Knows bytes and operations per step, and a device's two rates; no scheduler. Every result is a band: the low and the
high of the efficiencies that public measurements show, not a promise. Floor 1.
"""

from dataclasses import dataclass
from typing import Literal

from kvctl.model.hardware import HardwareProfile
from kvctl.model.kv_cache_spec import KVCacheSpec, request_bytes
from kvctl.model.layer_shape import LayerKind
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_size import Parallelism, WeightSize
from kvctl.sizing.kernel_time import Ceilings, Work

METHOD = "roofline with efficiency priors"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of a peak that is reached: the worst, the usual, the best seen."""

    low: float
    value: float
    high: float


# Sources (shares of peak, all fits): memory 0.55 (llmfit), 0.66 (RTX 3090, ninfer), 0.70 (RTX 5080 seeds' check:
# 39 tok/s x 16.2 GB of 896 GB/s), 0.8 (aiconfigurator); compute 0.32 L40S, 0.38 A100, 0.45 H100 (inference-sim).
MEMORY_EFFICIENCY = Efficiency(0.55, 0.70, 0.85)
COMPUTE_EFFICIENCY = Efficiency(0.28, 0.42, 0.62)
# A CPU profile is measured with the serving kernels, best of several runs on large matrices.
CPU_MEMORY_EFFICIENCY = Efficiency(0.6, 0.9, 1.2)
CPU_COMPUTE_EFFICIENCY = Efficiency(0.5, 0.8, 1.1)
STEP_OVERHEAD_S = Efficiency(0.0002, 0.0010, 0.0040)  # launch and scheduling per step; low .. high
ALL_REDUCE_LATENCY_S = 8e-6  # one small all-reduce on NVLink; twice a layer


@dataclass(frozen=True, slots=True)
class Band:
    """A number with the least and the most that the efficiencies give."""

    low: float
    value: float
    high: float


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """One row of the decode table: `batch` sequences, each with `context` tokens."""

    batch: int
    context: int
    tpot_s: Band
    tokens_per_s: Band
    bound: Literal["bandwidth", "compute"]
    kv_read_share: float
    intensity: float  # FLOP per byte of the step


@dataclass(frozen=True, slots=True)
class SpeedReport:
    """All speeds of one setup."""

    ridge_flop_per_byte: float
    compute_format: str
    prefill_tokens_per_s: Band
    prompt_tokens: int
    ttft_s: Band
    decode: tuple[DecodeSpeed, ...]
    compute_bound_batch: int | None  # first batch size where decode is compute-bound; None: not up to 4096


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Steps of one model on one setup. All figures are per GPU of the slowest stage, times the stages."""

    shape: ModelShape
    specs: tuple[KVCacheSpec, ...]
    weights: WeightSize
    hardware: HardwareProfile
    parallel: Parallelism
    dtype: str

    @property
    def flops(self) -> tuple[float, str]:
        """Peak FLOP/s of one GPU for these weights, and the format."""
        name = self.weights.format_name
        kind = "fp8" if name == "fp8" else "nvfp4" if name == "nvfp4" else "int8" if name in ("int8", "w8a8") else ""
        return self.hardware.compute_flops(kind, self.dtype)

    @property
    def bytes_per_s(self) -> float:
        """Peak memory bandwidth of one GPU."""
        return self.hardware.bandwidth_gb_s * 1e9

    @property
    def ridge(self) -> float:
        """FLOP per byte at which compute and bandwidth take equal time (at peak rates)."""
        return self.flops[0] / self.bytes_per_s

    def _memory(self) -> Efficiency:
        return CPU_MEMORY_EFFICIENCY if self.hardware.is_cpu else MEMORY_EFFICIENCY

    def _overhead_s(self) -> Efficiency:
        """Per step, beside bytes and operations: worst, usual, best (in seconds: the worst is the largest)."""
        if self.hardware.is_cpu:
            each = self.hardware.layer_overhead_s * self.shape.num_layers
            return Efficiency(2 * each, 1.2 * each, 0.8 * each)
        return Efficiency(STEP_OVERHEAD_S.high, STEP_OVERHEAD_S.value, STEP_OVERHEAD_S.low)

    def _compute(self) -> Efficiency:
        return CPU_COMPUTE_EFFICIENCY if self.hardware.is_cpu else COMPUTE_EFFICIENCY

    def attention_flops(self, query_tokens: int, context: int) -> float:
        """Scores and weighted sum of `query_tokens` queries over `context` keys, all GPUs together."""
        total = 0.0
        for layer in self.shape.layers:
            if layer.kind in (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.MLA, LayerKind.SHARED):
                reach = min(context, layer.window_tokens or context)
                width = layer.key_dim + (layer.value_dim or layer.key_dim)
                total += 2.0 * self.shape.num_attention_heads * width * query_tokens * reach
        return total

    def decode_bytes(self, batch: int, context: int) -> tuple[float, float]:
        """Bytes of weights and of KV cache that one GPU reads in a decode step."""
        kv = request_bytes(self.specs, context) or 0
        return self._weight_bytes(batch), float(kv) * batch / self.parallel.pipeline

    def _weight_bytes(self, tokens: int) -> float:
        """Weights read for a step of `tokens`: more tokens touch more experts, up to all."""
        view = self.shape.view
        count, chosen = view.get("num_experts"), view.get("num_experts_per_tok")
        one, everything = float(self.weights.read_bytes_per_gpu), float(self.weights.bytes_per_gpu)
        if not isinstance(count, int) or not isinstance(chosen, int) or chosen >= count:
            return one
        touched = 1 - (1 - chosen / count) ** tokens
        single = chosen / count
        expert_bytes = max(0.0, (everything - one) / (1 - single))
        return min(everything, one + expert_bytes * (touched - single))

    def step_flops(self, tokens: int, context: int, scored_tokens: int) -> float:
        """Operations of one GPU for `tokens` tokens in a step, each over `context`.

        The output head is multiplied for `scored_tokens` of them only: of a prompt, for its last one.
        """
        head = self.shape.vocab_size * self.shape.hidden_size
        layers = self.weights.active_parameters - self._embedding_parameters() - head
        matrices = 2.0 * (layers * tokens + head * scored_tokens)
        return (matrices + self.attention_flops(tokens, context)) / self.parallel.gpus

    def _embedding_parameters(self) -> int:
        """Looked up, not multiplied; a tied table is multiplied as the output head."""
        tied = self.shape.view.fields.get("tie_word_embeddings")
        return 0 if tied else self.shape.vocab_size * self.shape.hidden_size

    def _link_s(self, tokens: int) -> float:
        ranks = self.parallel.tensor
        if ranks == 1:
            return 0.0
        rate = (self.hardware.interconnect_gb_s or 2 * (self.hardware.host_link_gb_s or 12)) * 1e9 / 2
        moved = 2 * (ranks - 1) / ranks * tokens * self.shape.hidden_size * 2
        return 2 * self.shape.num_layers * (ALL_REDUCE_LATENCY_S + moved / rate)

    def _step_s(
        self, n_bytes: float, flops: float, tokens: int, memory: float, compute: float, extra_s: float
    ) -> float:
        reached = Ceilings(self.bytes_per_s * memory, self.flops[0] * compute)
        if self.hardware.is_cpu:  # its cores do one or the other (measured: scripts/size_vs_serve.py)
            stage = n_bytes / reached.bytes_per_s + flops / reached.flop_per_s
        else:  # overlapped, and the launches are in the overhead
            stage = Work(n_bytes, flops, launches=0).seconds(reached)
        return stage * self.parallel.pipeline + self._link_s(tokens) + extra_s

    def decode(self, batch: int, context: int) -> DecodeSpeed:
        """Time per output token of `batch` sequences decoding together."""
        weight_bytes, kv_bytes = self.decode_bytes(batch, context)
        flops = self.step_flops(batch, context, batch)
        total = weight_bytes + kv_bytes
        memory, compute, extra = self._memory(), self._compute(), self._overhead_s()
        high = self._step_s(total, flops, batch, memory.low, compute.low, extra.low)
        value = self._step_s(total, flops, batch, memory.value, compute.value, extra.value)
        low = self._step_s(total, flops, batch, memory.high, compute.high, extra.high)
        is_bandwidth = total / (self.bytes_per_s * memory.value) >= flops / (self.flops[0] * compute.value)
        return DecodeSpeed(
            batch=batch,
            context=context,
            tpot_s=Band(low, value, high),
            tokens_per_s=Band(batch / high, batch / value, batch / low),
            bound="bandwidth" if is_bandwidth else "compute",
            kv_read_share=kv_bytes / total if total else 0.0,
            intensity=flops / total if total else 0.0,
        )

    def prefill_s(self, prompt_tokens: int, *, cached_tokens: int = 0) -> Band:
        """Time to compute a prompt alone (its queue excluded), the cached prefix left out."""
        new = max(1, prompt_tokens - cached_tokens)
        reach = (prompt_tokens + cached_tokens) // 2
        flops = self.step_flops(new, max(1, reach), 1)
        n_bytes = self._weight_bytes(new)
        memory, compute, extra = self._memory(), self._compute(), self._overhead_s()
        return Band(
            self._step_s(n_bytes, flops, new, memory.high, compute.high, extra.high),
            self._step_s(n_bytes, flops, new, memory.value, compute.value, extra.value),
            self._step_s(n_bytes, flops, new, memory.low, compute.low, extra.low),
        )

    def burst(self, batch: int, prompt_tokens: int, output_tokens: int, step_tokens: int) -> tuple[Band, Band]:
        """Mean TTFT and mean TPOT when `batch` prompts arrive at once and a step computes up to `step_tokens`.

        Prompts are computed in order, several in one step; all that end in a step get their first token with it.
        After its own prompt a request still waits for the steps that compute the rest.
        """
        last = -(-batch * prompt_tokens // step_tokens)
        ends = [-(-(i + 1) * prompt_tokens // step_tokens) for i in range(batch)]  # the step each prompt ends in
        total = self.prefill_s(prompt_tokens)
        each = batch / last  # prompts a step
        ahead = sum(ends) / batch * each
        behind = (last - sum(ends) / batch) * each / max(1, output_tokens - 1)
        decode = self.decode(batch, prompt_tokens + output_tokens // 2).tpot_s
        ttft = Band(total.low * ahead, total.value * ahead, total.high * ahead)
        tpot = Band(
            decode.low + total.low * behind,
            decode.value + total.value * behind,
            decode.high + total.high * behind,
        )
        return ttft, tpot

    def report(self, prompt_tokens: int, batches: tuple[int, ...], context: int) -> SpeedReport:
        """Everything that the page shows."""
        prefill = self.prefill_s(prompt_tokens)
        bound = next((b for b in (1 << i for i in range(13)) if self.decode(b, context).bound == "compute"), None)
        return SpeedReport(
            ridge_flop_per_byte=self.ridge,
            compute_format=self.flops[1],
            prefill_tokens_per_s=Band(
                prompt_tokens / prefill.high, prompt_tokens / prefill.value, prompt_tokens / prefill.low
            ),
            prompt_tokens=prompt_tokens,
            ttft_s=prefill,
            decode=tuple(self.decode(batch, context) for batch in batches),
            compute_bound_batch=bound,
        )


def bandwidth_share(tokens_per_s: float, read_bytes: float, bandwidth_gb_s: float) -> float:
    """The share of peak bandwidth that a measured decode rate means: 39 tok/s x 16.2 GB of 896 GB/s = 70.5 %."""
    return tokens_per_s * read_bytes / (bandwidth_gb_s * 1e9)
