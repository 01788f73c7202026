"""Measured against predicted: numbers by hand from the model's bytes and the device's bandwidth."""

import pytest

from kvctl.bench.roofline import RooflineConfig, predict
from kvctl.errors import ConfigError
from kvctl.model.hardware import find_hardware


def summary(throughput=1000.0, in_flight=8.0, input_tokens=512.0, output_tokens=128.0):
    return {
        "steady": {"output_throughput": throughput, "mean_in_flight": in_flight},
        "input_tokens": {"mean": input_tokens, "cached_share": 0.0},
        "output_tokens": {"mean": output_tokens},
        "max_in_flight": in_flight,
        "output_throughput": throughput,
    }


def test_one_stream_cannot_pass_bandwidth_over_weights():
    found = predict(RooflineConfig("h100-sxm", "meta-llama/Llama-3.1-8B"), None, summary(100.0, 1.0, 16.0, 512.0))
    # 8.03e9 parameters of 2 bytes less the embedding table that is only looked up (128,256 x 4,096)
    weight_bytes = 2 * (8.03e9 - 128_256 * 4096)
    ceiling = find_hardware("h100-sxm").bandwidth_gb_s * 1e9 / weight_bytes
    assert found["roofline_output_throughput"] == pytest.approx(ceiling, rel=0.05)
    assert found["fraction_of_roofline"] == pytest.approx(100 / ceiling, rel=0.05)
    assert found["bound"] == "bandwidth"
    band = found["predicted_output_throughput"]
    assert band["low"] < band["value"] < band["high"] <= found["roofline_output_throughput"]


def test_the_kv_tokens_in_flight_are_told():
    found = predict(RooflineConfig("h100-sxm", "meta-llama/Llama-3.1-8B"), None, summary())
    assert found["kv_tokens_needed"] == 8 * 640
    assert "8 x 640 = 5,120 KV tokens" in found["text"]
    assert found["kv_tokens_held"] > 100_000


def test_a_model_that_is_not_known_leaves_the_measurement_alone(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = predict(RooflineConfig("h100-sxm", "no/such-model"), None, summary())
    assert found["text"].startswith("no prediction: no/such-model")


def test_a_served_name_that_is_no_model_says_which_option_names_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert predict(RooflineConfig("h100-sxm"), "my-alias", summary())["text"].endswith("(name it with --gpu-model)")


@pytest.mark.parametrize(("gpu", "count"), [("abacus", 1), ("l4", 0)])
def test_hardware_that_is_not_known_is_refused_before_the_run(gpu, count):
    with pytest.raises(ConfigError):
        RooflineConfig(gpu, None, count)


def test_a_run_that_tells_too_little_is_not_predicted():
    found = predict(RooflineConfig("h100-sxm", "meta-llama/Llama-3.1-8B"), None, summary(throughput=0.0))
    assert "too little" in found["text"]
