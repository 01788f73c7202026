"""The control flow of captured decode steps, on the CPU: a fake backend replays by running again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvctl.engine import build as build_module
from kvctl.engine.decode_graphs import DecodeGraphs, graph_sizes
from tests.support import tiny_models
from tests.support.engine_runs import greedy, start


class RerunBackend:
    """Replays what was captured by running it again: it sees only tensors that stayed in place."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.replays += 1
            run()

        return replay


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
    ],
)
def test_the_ladder_ends_at_the_largest_batch(most: int, expected: list[int]) -> None:
    assert graph_sizes(most) == expected


def test_the_ladder_stops_somewhere() -> None:
    sizes = graph_sizes(5000)
    assert sizes[-1] == 1024 and sizes == sorted(set(sizes)) and len(sizes) < 80


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_replayed_steps_give_the_tokens_of_eager_ones(
    tiny: tiny_models.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save(tiny, tmp_path)
    prompts = [[3 + (i * 7 + j) % 100 for j in range(5 + 9 * i)] for i in range(5)]
    eager = [r.token_ids for r in start(tmp_path, max_num_seqs=6).run(prompts, greedy(40), stagger_steps=3)]

    backend = RerunBackend()
    sizes: list[int] = []

    def capture(config, loaded, kv_cache, groups, report):
        with torch.inference_mode():
            graphs = DecodeGraphs(
                loaded.decoder, kv_cache.layers, backend,
                sizes=[1, 2, 4], max_blocks=-(-config.scheduler.max_model_len // kv_cache.block_size) + 1,
                block_size=kv_cache.block_size, num_groups=len(groups), device=loaded.device,
            )  # fmt: skip
        real = graphs.logits
        graphs.logits = lambda inputs: (sizes.append(len(inputs.rows)), real(inputs))[1]
        return graphs

    monkeypatch.setattr(build_module, "_capture_decode_graphs", capture)
    engine = start(tmp_path, max_num_seqs=6)
    captured = [r.token_ids for r in engine.run(prompts, greedy(40), stagger_steps=3)]
    assert captured == eager
    assert backend.replays == len(sizes) > 10
    assert {1, 2, 3, 4} <= set(sizes), "batches of 3 are padded to 4"
    assert max(sizes) == 4, "batches of 5 are beyond the ladder: they run eagerly"


def test_steps_that_ask_for_more_run_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save(tiny_models.LLAMA, tmp_path)
    backend = RerunBackend()

    def capture(config, loaded, kv_cache, groups, report):
        with torch.inference_mode():
            return DecodeGraphs(
                loaded.decoder, kv_cache.layers, backend, sizes=[4], max_blocks=17, block_size=16,
                num_groups=len(groups), device=loaded.device,
            )  # fmt: skip

    monkeypatch.setattr(build_module, "_capture_decode_graphs", capture)
    engine = start(tmp_path, max_num_seqs=6)
    result = engine.run([[5, 6, 7, 8]], greedy(6, prompt_logprobs=2, logprobs=2))[0]
    assert backend.replays == 5, "the prompt's step computes prompt logprobs, the others are replayed"
    assert len(result.prompt_logprobs or []) == 4 and len(result.logprobs) == 6
