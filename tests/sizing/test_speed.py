"""The roofline: the seeds' check, limits that must hold, and what moves which way."""

import pytest

from kvctl.model.hardware import find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.offload import offload_report
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.sizing.speed import SpeedModel, bandwidth_share


def model(name: str, gpu: str, *, tp: int = 1, quantization: str | None = None) -> SpeedModel:
    request = SizeRequest(
        model=load_model(name), hardware=find_hardware(gpu), parallel=Parallelism(tp), quantization=quantization
    )
    answer = size_up(request)
    assert answer.weights is not None and request.hardware is not None
    return SpeedModel(
        request.model.shape, answer.specs, answer.weights, request.hardware, request.parallel, answer.dtype
    )


def test_39_tokens_a_second_of_16_gb_are_70_percent_of_896_gb_s() -> None:
    assert round(39 * 16.2) == 632
    assert bandwidth_share(39, 16.2e9, 896) == pytest.approx(0.705, abs=0.001)


def test_the_ridge_point_of_an_h100_is_295_flop_per_byte() -> None:
    assert model("Qwen/Qwen2.5-7B-Instruct", "h100-sxm").ridge == pytest.approx(989.5e12 / 3.35e12, abs=1)


def test_one_sequence_cannot_be_faster_than_reading_the_weights_once() -> None:
    speed = model("meta-llama/Llama-3.1-8B", "rtx-5080")
    row = speed.decode(1, 128)
    floor_s = speed.weights.read_bytes_per_gpu / speed.bytes_per_s
    assert row.tpot_s.low > floor_s
    assert row.tpot_s.low < row.tpot_s.value < row.tpot_s.high
    assert 30 < row.tokens_per_s.value < 45  # 39 were measured at 896 GB/s


def test_decode_is_bandwidth_bound_for_one_and_compute_bound_for_many_short_sequences() -> None:
    speed = model("meta-llama/Llama-3.1-8B", "l4")
    assert speed.decode(1, 64).bound == "bandwidth"
    assert speed.decode(4096, 64).bound == "compute"


def test_longer_contexts_read_more_kv_and_take_longer() -> None:
    speed = model("meta-llama/Llama-3.1-8B", "h100")
    short, long = speed.decode(32, 1000), speed.decode(32, 30_000)
    assert short.kv_read_share < long.kv_read_share < 1
    assert short.tpot_s.value < long.tpot_s.value


def test_few_tokens_touch_few_experts() -> None:
    speed = model("Qwen/Qwen3-30B-A3B", "h100")
    one, many = speed.decode_bytes(1, 1)[0], speed.decode_bytes(512, 1)[0]
    assert one == pytest.approx(3.0e9 * 2, rel=0.15)
    assert many == pytest.approx(speed.weights.bytes_per_gpu, rel=0.05)


def test_two_ranks_halve_the_bytes_but_not_quite_the_time() -> None:
    alone, pair = model("meta-llama/Llama-3.1-8B", "h100"), model("meta-llama/Llama-3.1-8B", "h100", tp=2)
    assert pair.decode_bytes(1, 1)[0] == pytest.approx(alone.decode_bytes(1, 1)[0] / 2, rel=0.01)
    assert 1.2 < alone.decode(1, 1000).tpot_s.value / pair.decode(1, 1000).tpot_s.value < 2


def test_prefill_grows_faster_than_the_prompt() -> None:
    speed = model("meta-llama/Llama-3.1-8B", "h100")
    assert speed.prefill_s(64_000).value > 2 * speed.prefill_s(32_000).value
    assert speed.prefill_s(32_000, cached_tokens=16_000).value < speed.prefill_s(32_000).value


def test_a_window_caps_the_attention_of_a_long_prompt() -> None:
    speed = model("google/gemma-3-27b-it", "h100")
    assert speed.attention_flops(1, 100_000) < speed.attention_flops(1, 10_000) * 10


def test_loading_a_long_prefix_beats_computing_it_again() -> None:
    report = offload_report(model("meta-llama/Llama-3.1-8B", "h100"), 32_768)
    assert report is not None
    host, nvme = report.tiers
    assert report.prefix_bytes == 32_768 * 131_072
    assert host.load_s == pytest.approx(0.002 + 32_768 * 131_072 / 55e9)
    assert host.load_s < report.recompute_s and host.load_s < nvme.load_s
    assert host.break_even_tokens is not None and nvme.break_even_tokens is not None
    assert host.break_even_tokens <= nvme.break_even_tokens
