"""DeepSeek V4 under vLLM, against what its issues and changes print for V4-Flash and V4-Pro."""

from typing import Any

import pytest

from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape
from kvctl.sizing.capacity import Capacity
from kvctl.sizing.request import SizedModel, SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB

FLASH = "deepseek-ai/DeepSeek-V4-Flash"


def capacity_of(version: str, model: SizedModel | None = None, **asked: Any) -> Capacity:
    answer = size_up(SizeRequest(model=model or load_model(FLASH), engine=f"vllm@{version}", **asked))
    assert answer.capacity is not None
    return answer.capacity


def pro() -> SizedModel:
    """V4-Pro has 30 fine and 31 coarse layers, and none without a compressor."""
    config = {
        **find_model(FLASH).config,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
        "hidden_size": 7168,
        "num_attention_heads": 128,
    }
    return SizedModel("V4-Pro", ModelShape.from_config(config), "test")


def test_the_groups_of_v4_flash_are_the_five_of_issue_54703() -> None:
    pool = capacity_of("0.28.1", kv_bytes=10 * GIB).pool
    assert [(g.block_tokens, g.page_bytes) for g in pool.groups] == [
        (256, 1_002_240), (64, 823_680), (64, 786_240), (4, 870_912), (8, 656_640),
    ]  # fmt: skip


def test_one_request_of_30_000_tokens_needs_6_66_gib() -> None:
    """Issue 44376, vLLM 0.22: 6.66 GiB needed, 5.44 available, 13,528 tokens would fit."""
    asked = {"max_model_len": 30_000, "max_num_batched_tokens": 16_384}
    low, high = (capacity_of("0.22", kv_bytes=int(gib * GIB), **asked) for gib in (5.435, 5.445))
    assert round(low.needed_bytes / GIB, 2) == 6.66
    assert low.max_context_tokens <= 13_528 <= high.max_context_tokens


@pytest.mark.parametrize(("version", "block"), [("0.22", 1_051_776), ("0.24", 1_039_680), ("0.26", 1_002_240)])
def test_blocks_of_v4_flash_got_smaller_twice(version: str, block: int) -> None:
    assert capacity_of(version, kv_bytes=10 * GIB).pool.block_bytes == block


def test_the_first_change_brought_1_16_percent_more_tokens() -> None:
    """#44454: 329,601 tokens before, 333,437 after."""
    old, new = (capacity_of(v, kv_bytes=100 * GIB).pool.block_bytes for v in ("0.22", "0.24"))
    assert round(old / new - 1, 4) == round(333_437 / 329_601 - 1, 4) == 0.0116


def test_v4_pro_has_the_blocks_of_change_48993() -> None:
    """26.09 GiB were 19,015 blocks of 1,473,408 bytes."""
    low, high = (capacity_of("0.25", pro(), kv_bytes=int(gib * GIB), max_model_len=131_072) for gib in (26.085, 26.095))
    assert low.pool.block_bytes == 1_473_408
    assert low.num_blocks <= 19_015 <= high.num_blocks


def test_7_7_gib_hold_150_thousand_tokens_at_131_072() -> None:
    """Issue 51041: what made its author wonder."""
    found = capacity_of("0.26", kv_bytes=int(7.7 * GIB), max_model_len=131_072, max_num_batched_tokens=8192)
    assert round(found.kv_tokens, -4) == 150_000


def test_three_draft_layers_explain_the_case_dsv4_flash_1m() -> None:
    """11.04 GiB for 1,048,576 tokens, 1,001,216 tokens in 10.85 GiB: blocks of 23 rows, so 45 or 46 windows."""
    config = find_model(FLASH).config
    ratios = [*config["compress_ratios"][:43], 0, 0, 0]
    shape = ModelShape.from_config({**config, "num_hidden_layers": 46, "compress_ratios": ratios})
    asked = {"max_model_len": 1_048_576, "max_num_batched_tokens": 8192}
    model = SizedModel("with a draft", shape, "test")
    low, high = (capacity_of("0.26", model, kv_bytes=int(gib * GIB), **asked) for gib in (10.845, 10.855))
    assert round(low.needed_bytes / GIB, 2) == 11.04
    assert low.max_context_tokens <= 1_001_216 <= high.max_context_tokens
