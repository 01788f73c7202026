"""The demo model, a real one: its answers and probabilities against transformers in float32.

tests/data/demo_model_reference.json holds what transformers said (scripts/make_demo_reference.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import engine_runs

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "demo_model_reference.json").read_text())
NUM_PROMPTS = 20

LOAD_AND_MEASURE = """
import resource, sys
from pathlib import Path
import torch
import kvctl.engine.build
from tests.support import engine_runs

torch.nn.functional.linear(torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
before = resident_bytes()
engine = engine_runs.start(sys.argv[1], dtype="auto", cpu_kernels=sys.argv[2], num_blocks=None,
                           kv_cache_memory_bytes=2 << 30, max_model_len=1024)
# not ru_maxrss: that remembers the process which forked this one
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM:"))
print(peak - before, engine.info.weight_bytes, engine.info.kv_cache_bytes)
"""


@pytest.mark.slow
def test_float32_answers_equal_transformers_token_for_token(demo_folder):
    wanted = REFERENCE["greedy"][:NUM_PROMPTS]
    engine = engine_runs.start(
        demo_folder, cpu_kernels="auto", max_num_seqs=NUM_PROMPTS, num_blocks=400, max_num_batched_tokens=512
    )
    results = engine.run([each["prompt_token_ids"] for each in wanted], engine_runs.greedy(128))
    assert [result.token_ids for result in results] == [each["token_ids"] for each in wanted]


def test_float32_answer_to_a_chat_equals_transformers_with_plain_torch(demo_folder):
    wanted = REFERENCE["greedy"][NUM_PROMPTS : NUM_PROMPTS + 1]
    engine = engine_runs.start(demo_folder, cpu_kernels="torch", num_blocks=100)
    results = engine.run([each["prompt_token_ids"] for each in wanted], engine_runs.greedy(24))
    assert [result.token_ids for result in results] == [each["token_ids"][:24] for each in wanted]


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_log_probabilities_of_a_text_are_those_of_float32_transformers(dtype, limit, kernels, demo_folder):
    # transformers' own bfloat16 is at 0.037 on such a text
    engine = engine_runs.start(demo_folder, dtype=dtype, cpu_kernels=kernels, num_blocks=100)
    (result,) = engine.run([REFERENCE["text_token_ids"]], engine_runs.greedy(1, prompt_logprobs=0))
    differences = [
        abs(entry.logprobs[0] - expected)
        for entry, expected in zip(result.prompt_logprobs[1:], REFERENCE["text_logprobs"], strict=True)
    ]
    assert sum(differences) / len(differences) <= limit


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_loading_takes_little_more_memory_than_the_weights_and_the_cache_none_until_used(kernels, demo_folder):
    measured = subprocess.run(
        [sys.executable, "-c", LOAD_AND_MEASURE, str(demo_folder), kernels],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    peak, weight_bytes, kv_cache_bytes = map(int, measured.stdout.split())
    assert kv_cache_bytes > 5 * weight_bytes
    assert weight_bytes < peak < 1.15 * weight_bytes
