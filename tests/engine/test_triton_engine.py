"""A whole engine on the GPU kernels, in Triton's interpreter: the same tokens as on torch's operations.

What a kernel test cannot see: that the runner gives the kernels what they need, that steps over a shared prefix are
computed as a cascade, captured or not, and that the tokens stay the same.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvctl.engine import build as build_module
from kvctl.engine.cascade import CascadeRule
from kvctl.engine.decode_graphs import DecodeGraphs
from tests.support import tiny_models
from tests.support.engine_runs import greedy, start
from tests.support.triton_interpreter import repair

repair()
from kvctl_kernels.reference import TorchOps  # noqa: E402
from kvctl_kernels.triton_ops import TritonOps  # noqa: E402 (after the switch)

# numpy warns of inf - inf and of casts that CUDA does silently; the results are what these tests look at.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHARED = [3 + (5 * j) % 100 for j in range(32)]
PROMPTS = [[*SHARED, *(3 + (i * 11 + j) % 100 for j in range(3 + i))] for i in range(3)]
MIXED = next(tiny for tiny in tiny_models.ALL if tiny.name == "qwen2-sliding")


class Rerun:
    """Replays by running again."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Engines built now compute by the Triton kernels; lists the tokens of each shared prefix that was read once."""
    shared: list[int] = []
    real = TritonOps.cascade_decode

    def spy(self, query, k, v, tables, lens, prefix, **rest):
        shared.append(int(prefix[2]))
        return real(self, query, k, v, tables, lens, prefix, **rest)

    monkeypatch.setattr(TritonOps, "cascade_decode", spy)
    monkeypatch.setattr(build_module, "select_ops", lambda *_: TritonOps("cpu", arch="sm_90", num_multiprocessors=2))
    monkeypatch.setattr(CascadeRule, "pays", lambda self, requests, tokens: tokens >= 32)
    return shared


def tokens(folder: Path, **options: object) -> list[list[int]]:
    engine = start(folder, max_num_seqs=4, **options)
    first = engine.run(PROMPTS[:1], greedy(3))  # leaves the shared prefix in the cache
    return [r.token_ids for r in first + engine.run(PROMPTS, greedy(3))]


def test_a_cascade_over_float8_pages_gives_the_tokens_of_torch(tmp_path: Path, on_triton: list[int]) -> None:
    tiny_models.save(tiny_models.QWEN3, tmp_path)  # with norms of query and key
    got = tokens(tmp_path, kv_cache_dtype="fp8")
    assert on_triton and set(on_triton) == {32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "select_ops", lambda *_: TorchOps())
        assert got == tokens(tmp_path, kv_cache_dtype="fp8")


def test_windows_take_no_cascade_and_full_layers_beside_them_do(tmp_path: Path, on_triton: list[int]) -> None:
    tiny_models.save(MIXED, tmp_path)
    got = tokens(tmp_path)
    assert on_triton
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "select_ops", lambda *_: TorchOps())
        assert got == tokens(tmp_path)


def test_captured_cascades_are_padded_and_give_the_same(
    tmp_path: Path, on_triton: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save(tiny_models.LLAMA, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "select_ops", lambda *_: TorchOps())
        eager = tokens(tmp_path)
    used: list[tuple[int, bool]] = []
    real_run = DecodeGraphs._run
    monkeypatch.setattr(
        DecodeGraphs,
        "_run",
        lambda self, size, is_cascade: (used.append((size, is_cascade)), real_run(self, size, is_cascade))[1],
    )

    def capture(config, loaded, kv_cache, groups, report):
        with torch.inference_mode():
            graphs = DecodeGraphs(
                loaded.decoder, kv_cache.layers, Rerun(), sizes=[1, 4], max_blocks=17, block_size=16,
                num_groups=len(groups), device=loaded.device, cascade_groups=[0],
            )  # fmt: skip
        assert used == [(4, False), (1, False), (4, True)], "largest first"
        assert graphs.num_graphs == 3
        used.clear()
        on_triton.clear()
        return graphs

    monkeypatch.setattr(build_module, "_capture_decode_graphs", capture)
    assert tokens(tmp_path) == eager
    assert {(1, False), (4, True)} <= set(used), "three requests over one prefix run the cascade of four"
    assert set(on_triton) == {32}
