"""Overlapped steps give what steps one after another give: tokens, logprobs, reasons to end, cached tokens."""

from typing import Any

import pytest

from kvctl.core.sampling_params import SamplingParams
from tests.support import tiny_models
from tests.support.engine_runs import greedy, start

PROMPTS = [[3 + (i * 11 + j) % 100 for j in range(9 + 17 * i)] for i in range(6)]
SHARED = [[7] * 40 + [9 + i] * 5 for i in range(4)]
MIXED = [
    SamplingParams(temperature=0.9, seed=5, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=9, repetition_penalty=1.3, min_tokens=3),
    SamplingParams(temperature=1.1, top_k=20, top_p=0.8, max_tokens=15),
    SamplingParams(temperature=0.0, max_tokens=14, stop_token_ids=frozenset(range(40, 60))),
    SamplingParams(temperature=0.7, min_p=0.1, max_tokens=1, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=20, bad_words_token_ids=((11,), (5, 6)), logit_bias={9: 2.0}),
]
TIGHT = {"num_blocks": {"llama": 18, "gemma3": 88}}  # one request of the longest kind fits, four do not
CASES: dict[str, tuple[list[list[int]], Any, dict[str, Any]]] = {
    "greedy": (PROMPTS, greedy(20), {}),
    "chunks": (PROMPTS, greedy(12), {"max_num_batched_tokens": 16, "max_num_seqs": 8}),
    "one by one": (PROMPTS, greedy(8), {"max_num_seqs": 1}),
    "preempted": (PROMPTS, greedy(30), TIGHT),
    "every way to sample": (PROMPTS, MIXED, {}),
    "every way, preempted, in chunks": (PROMPTS, MIXED, {**TIGHT, "max_num_batched_tokens": 16}),
    "cached prefixes": (SHARED + SHARED, greedy(10), {"max_num_seqs": 3}),
    "float8 pages": (PROMPTS, greedy(12), {"kv_cache_dtype": "fp8"}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_overlapped_steps_tell_the_same(tiny: tiny_models.TinyModel, name: str, tiny_folder: Any) -> None:
    _, folder = tiny_folder(tiny)
    prompts, params, options = CASES[name]
    runs = []
    for overlapped in (False, True):
        asked = {"max_num_seqs": 4, **options, "async_scheduling": overlapped}
        if "num_blocks" in asked:
            asked["num_blocks"] = asked["num_blocks"][tiny.name]
        engine = start(folder, **asked)
        runs.append(engine.run(prompts, params, stagger_steps=2))
        engine.core.close()
    together, overlapped_run = runs
    assert [r.token_ids for r in overlapped_run] == [r.token_ids for r in together]
    for one, other in zip(together, overlapped_run, strict=True):
        assert (one.finish_reason, one.prompt_logprobs is None) == (other.finish_reason, other.prompt_logprobs is None)
        assert [entry.token_ids for entry in one.logprobs] == [entry.token_ids for entry in other.logprobs]
    if name == "preempted" and tiny is tiny_models.LLAMA:
        assert any(r.num_preemptions for r in overlapped_run), "the case must be what its name says"
