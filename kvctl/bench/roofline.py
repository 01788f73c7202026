"""Compares what was measured with what `size`'s arithmetic predicts for the hardware, and with its roofline. Floor 3.

Predicted output tokens/s at the batch that was really in flight: each request costs one prefill alone and its share of
the decode steps, `batch * n / (n * tpot(batch) + batch * prefill)`, n output tokens. The roofline is the same with
both peaks fully used: the ceiling that no server passes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvctl.errors import ConfigError, KvctlError, ModelNotFound
from kvctl.model.hardware import find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.speed import SpeedModel
from kvctl.units import format_count


@dataclass(frozen=True)
class RooflineConfig:
    """The accelerator and the model to compare with. `model` None: the served name."""

    gpu: str
    model: str | None = None
    num_gpus: int = 1

    def __post_init__(self) -> None:
        """A name that means nothing is refused before the run, not found out after it.

        Raises:
            ConfigError: no such hardware, or no GPU at all.
        """
        find_hardware(self.gpu)
        if self.num_gpus < 1:
            raise ConfigError(f"--num-gpus {self.num_gpus} is none", hint="Give --num-gpus 1 or more.")


def predict(config: RooflineConfig, served_model: str | None, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Predicted against measured output tokens/s, the share of the roofline, and the KV tokens needed.

    A model or hardware that is not known gives {"text": why}: the measurement stands without it.
    """
    try:
        return _predict(config, config.model or served_model or "", summary)
    except ModelNotFound as error:
        named = f"({error.hint})" if config.model is not None and error.hint else "(name it with --gpu-model)"
        return {"text": f"no prediction: {error.message} {named}"}
    except KvctlError as error:
        return {"text": f"no prediction: {error.message}" + (f" ({error.hint})" if error.hint else "")}


def _predict(config: RooflineConfig, model_name: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    hardware = find_hardware(config.gpu)
    model = load_model(model_name)
    parallel = Parallelism(tensor=config.num_gpus)
    answer = size_up(SizeRequest(model, hardware=hardware, parallel=parallel))
    steady = summary["steady"]
    measured = (steady or summary)["output_throughput"]
    input_tokens, output_tokens = summary["input_tokens"]["mean"], summary["output_tokens"]["mean"]
    if answer.weights is None or not measured or not input_tokens or not output_tokens:
        return {"text": "no prediction: the run or the model tells too little"}
    speed = SpeedModel(model.shape, answer.all_specs, answer.weights, hardware, parallel, answer.dtype)
    batch = max(1, round(steady["mean_in_flight"] if steady else summary["max_in_flight"]))
    context = round(input_tokens + output_tokens / 2)
    cached = round(input_tokens * (summary["input_tokens"]["cached_share"] or 0.0))
    decode = speed.decode(batch, context)
    prefill = speed.prefill_s(round(input_tokens), cached_tokens=cached)

    def throughput(tpot_s: float, prefill_s: float) -> float:
        return float(batch * output_tokens / (output_tokens * tpot_s + batch * prefill_s))

    predicted = throughput(decode.tpot_s.value, prefill.value)
    low, high = throughput(decode.tpot_s.high, prefill.high), throughput(decode.tpot_s.low, prefill.low)
    weight_bytes, kv_bytes = speed.decode_bytes(batch, context)
    peak_step_s = max(
        (weight_bytes + kv_bytes) / speed.bytes_per_s, speed.step_flops(batch, context, batch) / speed.flops[0]
    )
    peak_prefill_s = speed.step_flops(max(1, round(input_tokens) - cached), context, 1) / speed.flops[0]
    ceiling = throughput(peak_step_s, peak_prefill_s)
    needed = round(batch * (input_tokens + output_tokens))
    holds = answer.capacity.kv_tokens if answer.capacity is not None else None
    kv_text = f"; {batch} x {input_tokens + output_tokens:.0f} = {format_count(needed)} KV tokens"
    if holds:
        kv_text += f" of {format_count(holds)}"
    return {
        "hardware": hardware.name,
        "model": model.id,
        "batch": batch,
        "context_tokens": context,
        "predicted_output_throughput": {"low": low, "value": predicted, "high": high},
        "roofline_output_throughput": ceiling,
        "measured_output_throughput": measured,
        "fraction_of_roofline": measured / ceiling,
        "bound": decode.bound,
        "kv_tokens_needed": needed,
        "kv_tokens_held": holds,
        "text": f"measured {measured:,.0f} tok/s, predicted {predicted:,.0f} ({low:,.0f} to {high:,.0f}), "
        f"{measured / ceiling:.0%} of the roofline{kv_text}",
    }
