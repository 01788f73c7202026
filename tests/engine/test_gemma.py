"""Gemma 3 270M, real weights, past its sliding window of 512 tokens: against transformers in float32.

tests/data/gemma3_270m_reference.json holds what transformers said (scripts/make_gemma_reference.py).
"""

import json
from pathlib import Path

import pytest

from tests.support import engine_runs
from tests.support.gemma_model import gemma_folder

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "gemma3_270m_reference.json").read_text())
SETTINGS = {"max_model_len": 1024, "max_num_batched_tokens": 256, "num_blocks": None, "kv_cache_memory_bytes": 1 << 28}


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_text_past_the_window_reads_as_in_transformers(dtype, limit):
    engine = engine_runs.start(gemma_folder(), dtype=dtype, cpu_kernels="auto", **SETTINGS)
    # 15 of 18 layers slide: groups of 3 layers, one of them full
    assert [group.window_tokens for group in engine.core.scheduler.kv_cache_manager.groups] == [None] + [512] * 5
    (result,) = engine.run([REFERENCE["text_token_ids"]], engine_runs.greedy(1, prompt_logprobs=0))
    differences = [
        abs(entry.logprobs[0] - expected)
        for entry, expected in zip(result.prompt_logprobs[1:], REFERENCE["text_logprobs"], strict=True)
    ]
    assert sum(differences) / len(differences) <= limit
    past_window = differences[512:]
    assert sum(past_window) / len(past_window) <= limit


@pytest.mark.network
@pytest.mark.slow
def test_generation_past_the_window_equals_transformers_also_from_cached_blocks():
    engine = engine_runs.start(gemma_folder(), cpu_kernels="auto", **SETTINGS)
    prompt = REFERENCE["text_token_ids"][: REFERENCE["num_prompt_tokens"]]
    wanted = REFERENCE["token_ids"][:24]
    (first,) = engine.run([prompt], engine_runs.greedy(len(wanted)))
    (again,) = engine.run([prompt], engine_runs.greedy(6))
    assert first.token_ids == wanted
    assert again.token_ids == wanted[:6]
    assert again.num_cached_tokens > 512
