"""What float8 pages cost the demo model stays within bounds (scripts/fp8_cost.py prints the table)."""

import importlib.util
from pathlib import Path

import pytest

from kvctl.engine.tokenizer import Tokenizer

_SPEC = importlib.util.spec_from_file_location("fp8_cost", Path(__file__).parents[2] / "scripts" / "fp8_cost.py")
fp8_cost = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(fp8_cost)


def test_float8_pages_cost_the_demo_model_little(demo_folder: Path) -> None:
    exact, e4m3, e5m2 = fp8_cost.costs(demo_folder, Tokenizer.load(demo_folder).encode(fp8_cost.TEXT)[:320])
    assert (exact.kv_cache_dtype, e4m3.kv_cache_dtype, e5m2.kv_cache_dtype) == ("bfloat16", "fp8 (e4m3)", "fp8_e5m2")
    assert exact.bytes_per_number == 2 * e4m3.bytes_per_number
    assert e4m3.perplexity / exact.perplexity == pytest.approx(1, abs=0.05)
    assert e5m2.perplexity / exact.perplexity == pytest.approx(1, abs=0.08)
    assert 0.9 < e4m3.agreement < 1 and 0.82 < e5m2.agreement < 1
