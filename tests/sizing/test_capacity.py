"""Blocks, tokens and concurrency by each engine's rule: hand-computed cases, and properties over random shapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.errors import ModelNotSupported
from kvctl.model.kv_cache_spec import KVCacheSpec
from kvctl.model.layer_shape import LayerKind
from kvctl.sizing.capacity import Limits, build_pool, capacity
from kvctl.sizing.engine_rules import engine_rules
from kvctl.sizing.request import SizeAnswer, SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB


def ask(name: str, **choices: object) -> SizeAnswer:
    return size_up(SizeRequest(model=load_model(name), **choices))  # type: ignore[arg-type]


def test_21520_tokens_are_1345_blocks_of_which_1344_are_usable() -> None:
    answer = ask("meta-llama/Llama-3.1-8B-Instruct", kv_bytes=21_520 * 131_072, max_model_len=4096)
    assert answer.capacity is not None
    assert (answer.capacity.num_blocks, answer.capacity.usable_blocks) == (1345, 1344)
    assert answer.capacity.kv_tokens == 21_520


def test_4864_tokens_of_qwen_15b_are_304_blocks() -> None:
    answer = ask("Qwen/Qwen2.5-1.5B-Instruct", kv_bytes=4_864 * 28_672, engine="vllm@0.10")
    assert answer.capacity is not None and answer.capacity.num_blocks == 304


def test_gemma3_has_seven_groups_of_ten_layers() -> None:
    answer = ask("google/gemma-3-27b-it", engine="vllm@0.11", max_model_len=4096, max_num_batched_tokens=8192)
    assert answer.pool is not None
    assert len(answer.pool.groups) == 7
    assert answer.pool.blocks_per_request(4096, answer.limits) == 256 + 6 * 257
    assert any("padding" in note for note in answer.notes)


@pytest.mark.parametrize(
    ("name", "kv", "block"),
    [
        ("Qwen/Qwen3.5-35B-A3B", "auto", 1056),
        ("Qwen/Qwen3.5-35B-A3B", "fp8", 2096),
        ("Qwen/Qwen3.6-27B", "auto", 784),
        ("Qwen/Qwen3.6-27B", "fp8", 1568),
        ("Qwen/Qwen3.5-9B", "auto", 528),
        ("Qwen/Qwen3.5-9B", "fp8", 1056),
    ],
)
def test_gdn_blocks_grow_until_a_state_fits(name: str, kv: str, block: int) -> None:
    for tp in (1, 2):
        answer = ask(name, engine="vllm", kv_dtype=kv, parallel=_tp(tp))
        assert answer.pool is not None and answer.pool.block_tokens == block


def _tp(ranks: int):
    from kvctl.model.weight_size import Parallelism

    return Parallelism(ranks)


def test_gemma4_full_layers_get_blocks_of_twice_the_tokens() -> None:
    answer = ask("nvidia/Gemma-4-31B-IT-NVFP4", engine="vllm", kv_dtype="bfloat16")
    assert answer.pool is not None
    assert {g.kind.value: g.block_tokens for g in answer.pool.groups} == {"full": 32, "sliding": 16}
    assert {g.page_bytes for g in answer.pool.groups} == {10 * 16 * 16 * 2 * 256 * 2}


def test_llama4_chunks_are_priced_as_full_before_and_capped_after() -> None:
    old = ask("meta-llama/Llama-4-Scout-17B-16E-Instruct", engine="vllm@0.9", kv_bytes=100 * GIB, parallel=_tp(8))
    new = ask("meta-llama/Llama-4-Scout-17B-16E-Instruct", engine="vllm", kv_bytes=100 * GIB, parallel=_tp(8))
    assert old.capacity is not None and new.capacity is not None
    assert old.bytes_per_token_per_gpu == 24_576
    assert new.capacity.max_concurrency > 3 * old.capacity.max_concurrency


def test_old_versions_padded_the_latent_or_kept_whole_heads() -> None:
    for version, expected in (
        ("0.7", 78_080),
        ("0.7.1", 78_080),
        ("0.7.3", 78_080),
        ("0.7.4", 70_272),
        ("0.8", 70_272),
    ):
        r1 = ask("deepseek-ai/DeepSeek-R1", engine=f"vllm@{version}", parallel=_tp(8))
        assert r1.bytes_per_token_per_gpu == expected
    assert ask("deepseek-ai/DeepSeek-R1", engine="vllm@0.7.0", parallel=_tp(8)).bytes_per_token_per_gpu > 900_000
    whole = ask("deepseek-ai/DeepSeek-V3", engine="vllm@0.6.6", parallel=_tp(8))
    assert whole.bytes_per_token_per_gpu == 61 * 16 * 256 * 2 * 2


def test_tokens_on_a_hybrid_depend_on_max_model_len_in_new_versions_only() -> None:
    def tokens(engine: str, length: int) -> int:
        answer = ask("Qwen/Qwen3.6-35B-A3B", engine=engine, kv_bytes=6 * GIB, kv_dtype="fp8", max_model_len=length)
        assert answer.capacity is not None
        return answer.capacity.kv_tokens

    assert tokens("vllm@0.20", 131_072) == tokens("vllm@0.20", 262_144)
    assert tokens("vllm@0.24", 131_072) != tokens("vllm@0.24", 262_144)


def test_sglang_keeps_states_apart_in_a_fixed_share() -> None:
    """A log prints 28.1 GiB of keys and values, 19,644,177 tokens, and beside them 25.28 GiB of 2,211 states."""
    answer = ask(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        engine="sglang",
        kv_bytes=int(28.1 * GIB),
        kv_dtype="fp8",
        parallel=_tp(4),
    )
    assert answer.capacity is not None and answer.pool is not None
    assert answer.capacity.kv_tokens == pytest.approx(19_644_177, rel=0.001)
    assert answer.capacity.state_slots == pytest.approx(2211, abs=3)
    whole = capacity(answer.pool, int((28.1 + 25.28) * GIB), answer.limits, longest_tokens=1, holds_states=True)
    assert whole.kv_tokens == pytest.approx(19_644_177, rel=0.001)
    assert whole.state_slots == pytest.approx(2211, abs=3)


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm@0.7", "trtllm"])
def test_memory_that_is_given_is_of_keys_and_values_and_states_lie_beside_it(engine: str) -> None:
    """llama.cpp prints 768 MiB of cells for Falcon-H1 and 72.98 MiB of states apart; V0 made states first."""
    answer = ask("tiiuae/Falcon-H1-1.5B-Instruct", engine=engine, kv_bytes=768 << 20, max_model_len=32768)
    assert answer.capacity is not None and answer.pool is not None
    assert answer.capacity.kv_tokens == 32_768
    whole = capacity(answer.pool, 768 << 20, answer.limits, longest_tokens=32_768, holds_states=True)
    assert whole.kv_tokens < 32_768


def test_the_null_block_costs_a_request_that_would_fit_exactly() -> None:
    exact = 256 * 16 * 131_072
    tight = ask("meta-llama/Llama-3.1-8B", engine="vllm", kv_bytes=exact, max_model_len=4096)
    assert tight.capacity is not None and not tight.capacity.fits
    assert tight.capacity.max_context_tokens == 4096 - 16
    roomy = ask("meta-llama/Llama-3.1-8B", engine="vllm", kv_bytes=exact + 16 * 131_072, max_model_len=4096)
    assert roomy.capacity is not None and roomy.capacity.fits


def test_deepseek_v4_packing_is_not_guessed_but_its_ideal_bytes_are_told() -> None:
    assert ask("deepseek-ai/DeepSeek-V4-Flash", engine="vllm").bytes_per_token > 0
    with pytest.raises(ModelNotSupported, match="cannot tell"):
        ask("deepseek-ai/DeepSeek-V4-Flash", engine="sglang", kv_bytes=10 * GIB)
    with pytest.raises(ModelNotSupported, match="cannot tell"):  # the layout is known for FP8 alone
        ask("deepseek-ai/DeepSeek-V4-Flash", engine="vllm", kv_bytes=10 * GIB, kv_dtype="bfloat16")


layers = st.lists(
    st.tuples(st.sampled_from(["full", "sliding"]), st.sampled_from([64, 128]), st.sampled_from([100, 1000])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=200, deadline=None)
@given(
    layers, st.integers(0, 1 << 26), st.integers(1, 5000), st.sampled_from(["kvctl", "vllm@0.11", "vllm@0.7", "sglang"])
)
def test_capacity_never_contradicts_itself(shape, kv_bytes: int, length: int, engine: str) -> None:
    specs = [
        KVCacheSpec(
            i, LayerKind.FULL if kind == "full" else LayerKind.SLIDING, size, None if kind == "full" else window
        )
        for i, (kind, size, window) in enumerate(shape)
    ]
    pool = build_pool(specs, engine_rules(engine), None)
    limits = Limits(length, 512)
    found = capacity(pool, kv_bytes, limits, longest_tokens=length)
    assert found.num_blocks * pool.block_bytes <= kv_bytes
    assert sum(len(g.layer_indices) for g in pool.groups) == len(shape)
    assert found.fits == (found.max_context_tokens >= length)
    more = capacity(pool, kv_bytes + pool.block_bytes, limits, longest_tokens=length)
    assert more.num_blocks == found.num_blocks + 1
    assert more.max_concurrency >= found.max_concurrency
    assert pool.blocks_per_request(length, limits) <= pool.blocks_per_request(length + 1, limits)


def test_ranks_that_share_a_context_multiply_the_tokens() -> None:
    from kvctl.model.weight_size import Parallelism

    choices = {"engine": "vllm@0.10.2", "kv_bytes": 20 * GIB, "parallel": Parallelism(8), "max_model_len": 262_144}
    alone = ask("Qwen/Qwen3-235B-A22B", **choices).capacity
    shared = ask("Qwen/Qwen3-235B-A22B", **choices, context_parallel=2).capacity
    assert alone is not None and shared is not None
    assert shared.kv_tokens == 2 * alone.kv_tokens
    assert shared.max_concurrency == pytest.approx(shared.kv_tokens / 262_144, rel=1e-3)


def test_llamacpp_gives_windowed_layers_a_small_cache_of_their_own() -> None:
    answer = ask("openai/gpt-oss-120b", engine="llama.cpp", kv_bytes=2 * GIB, max_num_seqs=6, max_model_len=32_768)
    assert answer.capacity is not None and answer.pool is not None
    cells = 1280  # 6 x 128 + 512, as a log of gpt-oss prints
    layer = 2 * 8 * 64 * 2
    assert answer.capacity.kv_tokens == (2 * GIB - 18 * cells * layer) // (18 * layer)


def test_tpus_have_blocks_of_a_sixteenth_of_the_length() -> None:
    from kvctl.model.hardware import find_hardware

    answer = ask("meta-llama/Llama-3.1-8B", engine="vllm", hardware=find_hardware("tpu-v6e"), max_model_len=131_072)
    assert answer.pool is not None and answer.pool.block_tokens == 256


def test_latent_hybrids_round_blocks_to_64_tokens() -> None:
    answer = ask("moonshotai/Kimi-K3", engine="vllm", kv_bytes=10 * GIB, parallel=_tp(8))
    assert answer.pool is not None and answer.pool.block_tokens % 64 == 0


def test_ideal_counts_windows_and_states_once_and_knows_no_blocks() -> None:
    gemma = ask("google/gemma-3-27b-it", engine="ideal", kv_bytes=10 * GIB, max_model_len=32_768)
    layer = 2 * 16 * 128 * 2
    assert gemma.capacity is not None
    assert gemma.capacity.needed_bytes == layer * (10 * 32_768 + 52 * 1024)
    assert gemma.capacity.max_concurrency == pytest.approx(10 * GIB / gemma.capacity.needed_bytes)
    tight = ask("google/gemma-3-27b-it", engine="ideal", kv_bytes=gemma.capacity.needed_bytes - 1, max_model_len=32_768)
    assert tight.capacity is not None and not tight.capacity.fits
    assert tight.capacity.max_context_tokens == 32_767


def test_ideal_answers_for_deepseek_v4_too() -> None:
    answer = ask("deepseek-ai/DeepSeek-V4-Flash", engine="ideal", kv_bytes=10 * GIB)
    assert answer.capacity is not None and answer.capacity.max_concurrency > 1
