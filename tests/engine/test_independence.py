"""What a request gets must not depend on anything but the request: not on who else is in the batch, on chunks, on
the block size, on prefix hits, on preemptions. Greedy and seeded, in float32, for every kind of attention layer.
"""

import pytest
import torch

from kvctl.core.sampling_params import SamplingParams
from tests.support import engine_runs, tiny_models

MODELS = (tiny_models.LLAMA, tiny_models.MISTRAL_SLIDING, tiny_models.GEMMA3)
NUM_NEW_TOKENS = 24
SHARED_PREFIX_LENGTH = 48


def prompts():
    generator = torch.Generator().manual_seed(11)

    def ids(count):
        return torch.randint(3, tiny_models.VOCAB_SIZE, (count,), generator=generator).tolist()

    prefix = ids(SHARED_PREFIX_LENGTH)
    return [ids(3), prefix + ids(1), ids(64), prefix + ids(30), ids(17), prefix + ids(9), ids(90)]


def params(kind):
    if kind == "greedy":
        return [engine_runs.greedy(NUM_NEW_TOKENS)] * len(prompts())
    return [
        SamplingParams(
            temperature=1.3,
            top_k=40,
            top_p=0.95,
            frequency_penalty=0.2,
            seed=100 + index,
            max_tokens=NUM_NEW_TOKENS,
            ignore_eos=True,
        )
        for index in range(len(prompts()))
    ]


@pytest.fixture(scope="module")
def alone(tiny_folder):
    """Each request on an engine of its own settings: no batch, no chunk, no prefix cache, plenty of blocks."""
    known = {}

    def get(tiny, kind):
        if (tiny.name, kind) not in known:
            _, folder = tiny_folder(tiny)
            engine = engine_runs.start(folder, enable_prefix_caching=False, max_num_seqs=1)
            known[tiny.name, kind] = [
                engine.run([prompt], [own])[0].token_ids for prompt, own in zip(prompts(), params(kind), strict=True)
            ]
        return known[tiny.name, kind]

    return get


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
class TestTokensDoNotDependOn:
    def run(self, tiny, kind, tiny_folder, alone, *, stagger_steps=0, **settings):
        _, folder = tiny_folder(tiny)
        engine = engine_runs.start(folder, **settings)
        results = engine.run(prompts(), params(kind), stagger_steps=stagger_steps)
        assert [result.token_ids for result in results] == alone(tiny, kind)
        engine.core.scheduler.kv_cache_manager.check_integrity()
        assert engine.core.scheduler.kv_cache_manager.usage == 0
        return engine, results

    def test_the_batch(self, tiny, kind, tiny_folder, alone):
        self.run(tiny, kind, tiny_folder, alone)

    def test_the_moment_of_arrival(self, tiny, kind, tiny_folder, alone):
        self.run(tiny, kind, tiny_folder, alone, stagger_steps=3)

    @pytest.mark.parametrize("chunk", [8, 29])
    def test_the_chunk_size(self, tiny, kind, chunk, tiny_folder, alone):
        engine, _ = self.run(tiny, kind, tiny_folder, alone, max_num_batched_tokens=chunk, max_num_seqs=7)
        assert max(stats.num_scheduled_tokens for stats in engine.stats) == chunk

    @pytest.mark.parametrize("block_size", [1, 8, 32])
    def test_the_block_size(self, tiny, kind, block_size, tiny_folder, alone):
        self.run(tiny, kind, tiny_folder, alone, block_size=block_size, num_blocks=3200 // block_size)

    def test_prefix_hits(self, tiny, kind, tiny_folder, alone):
        _, folder = tiny_folder(tiny)
        engine = engine_runs.start(folder, num_blocks=800)
        for _round in range(2):
            results = engine.run(prompts(), params(kind))
            assert [result.token_ids for result in results] == alone(tiny, kind)
        assert sum(result.num_cached_tokens > 0 for result in results) >= len(prompts()) - 2
        engine.core.scheduler.kv_cache_manager.check_integrity()

    def test_preemption(self, tiny, kind, tiny_folder, alone):
        few = 14 if tiny is not tiny_models.GEMMA3 else 44
        _, results = self.run(
            tiny, kind, tiny_folder, alone, num_blocks=few, max_model_len=128, max_num_batched_tokens=64
        )
        assert sum(result.num_preemptions for result in results) > 0


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_prompt_logprobs_do_not_depend_on_chunks_or_on_the_batch(tiny, tiny_folder):
    _, folder = tiny_folder(tiny)
    wanted = engine_runs.greedy(4, prompt_logprobs=3, logprobs=2)
    (whole,) = engine_runs.start(folder).run([prompts()[6]], wanted)
    chunked = engine_runs.start(folder, max_num_batched_tokens=17).run(
        [prompts()[2], prompts()[6]], [engine_runs.greedy(30), wanted]
    )[1]
    assert whole.prompt_logprobs[0] is None and chunked.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == len(chunked.prompt_logprobs) == len(prompts()[6])
    for one, other in zip(
        whole.prompt_logprobs[1:] + whole.logprobs, chunked.prompt_logprobs[1:] + chunked.logprobs, strict=True
    ):
        assert one.token_ids == other.token_ids
        assert one.rank == other.rank
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert len(whole.logprobs) == 4


def test_prompt_logprobs_come_once_even_if_the_request_is_preempted(tiny_folder):
    _, folder = tiny_folder(tiny_models.LLAMA)
    engine = engine_runs.start(folder, num_blocks=14, max_model_len=128, max_num_batched_tokens=64)
    results = engine.run(prompts()[2:5], engine_runs.greedy(40, prompt_logprobs=0))
    assert sum(result.num_preemptions for result in results) > 0
    for prompt, result in zip(prompts()[2:5], results, strict=True):
        assert [entry.token_ids[0] for entry in result.prompt_logprobs[1:]] == prompt[1:]
