"""Public reports of servers that are not among the project's cases and from which no rule was made: what they print
must come out, within its own rounding."""

from typing import Any

import pytest

from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.capacity import Capacity
from kvctl.sizing.request import SizedModel, SizeRequest, size_up
from kvctl.units import GIB

ROUNDING = 0.005  # GiB
GEMMA_4_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4_text", "num_hidden_layers": 60,
    "hidden_size": 5376, "intermediate_size": 21_504, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262_144, "torch_dtype": "bfloat16", "vocab_size": 262_144,
}  # fmt: skip
QWEN35_27B: dict[str, Any] = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 64, "full_attention_interval": 4, "hidden_size": 5120,
    "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def sized(model: str | dict[str, Any], version: str, gib: float, **asked: Any) -> tuple[Capacity, Capacity]:
    """The answers at the least and the most memory that `gib` may stand for."""
    config = find_model(model).config if isinstance(model, str) else model
    found = []
    for memory in (gib - ROUNDING, gib + ROUNDING):
        request = SizeRequest(
            model=SizedModel("m", ModelShape.from_config(config), "test"),
            engine=f"vllm@{version}",
            kv_bytes=int(memory * GIB),
            **asked,
        )
        answer = size_up(request)
        assert answer.capacity is not None
        found.append(answer.capacity)
    return found[0], found[1]


@pytest.mark.parametrize(
    ("model", "version", "gib", "tokens"),
    [
        (GEMMA_4_31B, "0.19.1", 24.54, 26_800),  # hf-mem, pull request 61
        ("Qwen/Qwen3-1.7B", "0.14", 18.78, 175_856),  # issue 33263
    ],
)
def test_tokens_that_servers_printed(model: str | dict[str, Any], version: str, gib: float, tokens: int) -> None:
    low, high = sized(model, version, gib)
    assert low.kv_tokens <= tokens <= high.kv_tokens


def test_a_request_that_a_server_refused() -> None:
    """Issue 25350: 10.12 GiB for 221,000 tokens, 122,080 in 5.59 GiB."""
    low, high = sized("Qwen/Qwen3-30B-A3B", "0.10.2", 5.59, kv_dtype="fp8", max_model_len=221_000)
    assert round(low.needed_bytes / GIB, 2) == 10.12
    assert low.max_context_tokens <= 122_080 <= high.max_context_tokens


def test_a_hybrid_of_0_19_printed_a_quarter_of_its_blocks_and_45_blocks_a_request() -> None:
    """Issue 40691: 290,864 tokens and 33.04x at 32,768 are 1,487 blocks of 784 tokens in four groups."""
    block = sized(QWEN35_27B, "0.19.0", 10)[0].pool.block_bytes
    found, _ = sized(QWEN35_27B, "0.19.0", 1487.5 * block / GIB + ROUNDING, max_model_len=32_768)
    assert found.num_blocks == 1487
    assert (found.kv_tokens, round(found.max_concurrency, 2)) == (290_864, 33.04)


def test_sglang_printed_twice_the_tokens_for_as_many_bytes_as_its_keys_and_values_take() -> None:
    """Issue 21348: Qwen3-235B on four GPUs, 367,404 tokens, K and V 8.23 GiB each."""
    shape = ModelShape.from_config(find_model("Qwen/Qwen3-235B-A22B").config)
    answers = [
        size_up(
            SizeRequest(
                model=SizedModel("m", shape, "test"),
                engine="sglang",
                kv_bytes=int(2 * gib * GIB),
                parallel=Parallelism(tensor=4),
            )
        ).capacity
        for gib in (8.225, 8.235)
    ]
    assert answers[0] and answers[1]
    assert answers[0].kv_tokens <= 367_404 <= answers[1].kv_tokens
