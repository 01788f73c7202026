"""What the attention kernels move, counted in the interpreter: nothing out of bounds, each K/V sector read once."""

import pytest
import torch

from tests.kernels.oracle import PagedBatch, paged_batch
from tests.support.triton_interpreter import repair
from tests.support.triton_tracer import Traffic, trace

repair()
from kvctl_kernels.triton_ops import TritonOps  # noqa: E402

# numpy warns of inf - inf and of casts that CUDA does silently; the results are what these tests look at.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

OPS = TritonOps("cpu", arch="sm_90", num_multiprocessors=4)


def decode(batch: PagedBatch, splits: int, window: int | None = None) -> dict[str, Traffic]:
    num_requests, heads, head_dim = batch.query.shape
    out = torch.empty_like(batch.query)
    tensors = {"k": batch.k_cache, "v": batch.v_cache, "q": batch.query, "out": out}
    tensors |= {"tables": batch.meta.block_tables, "lens": batch.meta.seq_lens}
    if splits > 1:
        tensors["parts"] = torch.empty((num_requests, heads, splits, head_dim))
        tensors["lse"] = torch.empty((num_requests, heads, splits))
    with pytest.MonkeyPatch.context() as patch:
        if splits > 1:
            feed = iter([tensors["parts"], tensors["lse"]])
            patch.setattr(torch, "empty", lambda *args, **kwargs: next(feed))
        with trace(**tensors) as traffic:
            OPS.paged_decode(
                batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens,
                scale=0.125, window=window, splits=splits, out=out,
            )  # fmt: skip
    return traffic


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("lengths", [[512, 300], [1, 17, 64], [129]])
def test_decode_reads_each_sector_of_k_and_v_once(splits: int, lengths: list[int]) -> None:
    batch = paged_batch(
        [1] * len(lengths), lengths, num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16
    )  # fmt: skip
    traffic = decode(batch, splits)
    ideal = sum(lengths) * 2 * 64 * 2  # tokens x KV heads x head_dim x 2 bytes
    for name in ("k", "v"):
        assert traffic[name].loaded_bytes == ideal
        assert traffic[name].sectors == traffic[name].unique_sectors == ideal // 32


def test_all_that_decode_moves_is_within_a_tenth_of_the_ideal() -> None:
    batch = paged_batch(
        [1, 1], [512, 300], num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16
    )  # fmt: skip
    traffic = decode(batch, splits=4)
    ideal = 2 * (512 + 300) * 2 * 64 * 2 + 2 * 2 * 8 * 64 * 2  # K and V, query and output
    assert 32 * sum(entry.sectors for entry in traffic.values()) <= 1.1 * ideal


def test_a_window_leaves_the_rest_unread() -> None:
    batch = paged_batch(
        [1], [500], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, window=100
    )  # fmt: skip
    assert decode(batch, splits=2, window=100)["k"].loaded_bytes == 100 * 2 * 64 * 2


def test_a_shared_prefix_is_read_once_for_all_requests() -> None:
    """The cascade: 16 queries of 16 requests over one 128-token prefix, as one causal-free prefill."""
    batch = paged_batch([1], [128], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    query = torch.randn(16, 4, 64).bfloat16()
    out, lse = torch.empty_like(query), torch.empty(16, 4)
    starts = torch.tensor([0, 16], dtype=torch.int32)
    with trace(
        k=batch.k_cache, v=batch.v_cache, q=query, out=out, lse=lse, starts=starts,
        tables=batch.meta.block_tables, lens=batch.meta.seq_lens,
    ) as traffic:  # fmt: skip
        OPS.paged_prefill(
            query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens, starts,
            num_query_tokens=16, scale=0.125, causal=False, out=out, lse=lse,
        )  # fmt: skip
    once = 128 * 2 * 64 * 2
    assert traffic["k"].loaded_bytes == traffic["v"].loaded_bytes == once
    assert traffic["k"].sectors == traffic["k"].unique_sectors


def test_prefill_reads_keys_once_per_block_of_queries() -> None:
    batch = paged_batch([40], [72], num_heads=4, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.bfloat16)
    out = torch.empty_like(batch.query)
    with trace(
        k=batch.k_cache, v=batch.v_cache, q=batch.query, out=out, starts=batch.meta.query_start_loc,
        tables=batch.meta.block_tables, lens=batch.meta.seq_lens,
    ) as traffic:  # fmt: skip
        OPS.paged_prefill(
            batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens,
            batch.meta.query_start_loc, num_query_tokens=40, scale=0.125, out=out,
        )  # fmt: skip
    # 128 rows hold 32 tokens x 4 heads: two blocks, the first sees 64 tokens, the second all 72.
    assert traffic["k"].loaded_bytes == (64 + 72) * 64 * 2


def test_the_tracer_catches_a_bad_page_id() -> None:
    batch = paged_batch([1], [40], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    batch.meta.block_tables[0, 1] = 9999
    with pytest.raises(Exception, match="AccessError"):  # the interpreter wraps it
        decode(batch, splits=1)


def test_the_tracer_catches_a_context_longer_than_its_table() -> None:
    batch = paged_batch([1], [40], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    batch.meta.seq_lens[0] = 400
    with pytest.raises(Exception, match="AccessError"):  # the interpreter wraps it
        decode(batch, splits=1)
