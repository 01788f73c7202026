"""Parameters and weight bytes, against transformers' counts, published counts and printed logs."""

import json
from pathlib import Path

import pytest

from kvctl.errors import ConfigError
from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_formats import checkpoint_format, named_format, unquantized
from kvctl.model.weight_parts import weight_parts
from kvctl.model.weight_size import Parallelism, WeightSize, computed_weight_size
from kvctl.units import GIB

COUNTS = json.loads((Path(__file__).parent.parent / "data/sizing/parameter_counts.json").read_text())["counts"]


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(find_model(name).config)


def weights(name: str, quantization: str | None = None, *, tp: int = 1, **parallel: int | bool) -> WeightSize:
    shape = shape_of(name)
    raw = shape.view.outer.get("quantization_config")
    fmt = named_format(quantization, shape.dtype) if quantization else checkpoint_format(raw, shape.dtype)
    found = computed_weight_size(shape, fmt, Parallelism(tp, **parallel))  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_counts_are_those_of_transformers(name: str) -> None:
    parts = weight_parts(shape_of(name))
    assert parts is not None
    assert sum(part.num_parameters for part in parts) == COUNTS[name]


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("deepseek-ai/DeepSeek-V3", 671_026_419_200),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("openai-community/gpt2", 124_439_808),
        ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
        ("openai/gpt-oss-120b", 116_829_156_672),
    ],
)
def test_counts_are_the_published_ones(name: str, published: int) -> None:
    assert weights(name).num_parameters == published


def test_a_tied_table_is_counted_once() -> None:
    assert weights("meta-llama/Llama-3.2-1B-Instruct").num_parameters == 1_235_814_400


@pytest.mark.parametrize(
    ("name", "quantization", "tp", "printed_gib"),
    [
        ("meta-llama/Llama-3.1-8B", None, 1, 14.96),
        ("Qwen/Qwen2-7B-Instruct", None, 2, 7.12),
        ("Qwen/Qwen3-4B", None, 1, 7.5552),
        ("Qwen/Qwen2.5-0.5B-Instruct", None, 1, 0.9277),
        ("microsoft/Phi-4-mini-instruct", None, 1, 7.1694),
        ("meta-llama/Llama-3.1-8B", "fp8", 1, 8.4927),
        ("meta-llama/Llama-3.1-70B-Instruct", "w8a8", 1, 67.7229),
        ("meta-llama/Llama-3.3-70B-Instruct", "fp8", 4, 16.9619),
        ("meta-llama/Llama-3.2-3B-Instruct", "Q8_0", 1, 3.2637),
        ("mistralai/Mistral-7B-Instruct-v0.3", "gptq", 1, 3.8931),
        ("meta-llama/Llama-3.2-3B-Instruct", "nvfp4", 1, 2.26),
        ("openai/gpt-oss-120b", None, 1, 65.9651),
        ("LGAI-EXAONE/EXAONE-4.0-32B", "fp8", 1, 30.9891),
        ("Qwen/Qwen3.5-35B-A3B", "fp8", 1, 34.22),
    ],
)
def test_weight_bytes_are_near_what_servers_print(
    name: str, quantization: str | None, tp: int, printed_gib: float
) -> None:
    """Engines add buffers and padding: within 3 % (quantized formats leave some layers alone)."""
    assert weights(name, quantization, tp=tp).bytes_per_gpu / GIB == pytest.approx(printed_gib, rel=0.03)


def test_experts_are_spread_over_data_parallel_ranks() -> None:
    alone = weights("Qwen/Qwen3-Coder-480B-A35B-Instruct", "fp8")
    spread = weights("Qwen/Qwen3-Coder-480B-A35B-Instruct", "fp8", data=8, expert=True)
    assert spread.bytes_per_gpu < alone.bytes_per_gpu / 6


def test_one_token_uses_eight_of_128_experts() -> None:
    assert weights("Qwen/Qwen3-30B-A3B").active_parameters == pytest.approx(3.3e9, rel=0.03)


def test_four_bits_with_groups_of_128_cost_their_scales_and_zero_points() -> None:
    fmt = checkpoint_format({"quant_method": "awq", "bits": 4, "group_size": 128}, "float16")
    assert float(fmt.linear_bits) == 4 + (16 + 4) / 128


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (None, "bfloat16"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "weights": {"num_bits": 8, "type": "float"}}, "fp8"),
        (
            {"quant_method": "compressed-tensors",
             "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
            "compressed-tensors int4 g32",
        ),
    ],
)  # fmt: skip
def test_a_checkpoints_own_format_is_read(raw: dict | None, name: str) -> None:
    assert checkpoint_format(raw, "bfloat16").name == name


def test_an_unknown_quantization_is_refused() -> None:
    with pytest.raises(ConfigError):
        named_format("zork4", "bfloat16")


def test_a_family_without_known_matrices_has_no_count() -> None:
    shape = shape_of("moonshotai/Kimi-K3")
    assert computed_weight_size(shape, unquantized("bfloat16"), Parallelism()) is None
