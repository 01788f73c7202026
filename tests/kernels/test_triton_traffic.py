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


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (7, 1)])
def test_a_cascade_reads_the_shared_prefix_once_and_each_own_part_once(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a cascade loads of K and V: 8 requests over one 128-token prefix, each with up to 40 tokens more."""
    lengths, shared = [128 + 5 * i for i in range(1, 9)], 128
    batch = paged_batch(
        [1] * 8, lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=64, block_size=16, dtype=torch.bfloat16
    )  # fmt: skip
    batch.meta.block_tables[:, : shared // 16] = batch.meta.block_tables[0, : shared // 16]
    out, prefix = torch.empty_like(batch.query), torch.tensor([0, 8, shared], dtype=torch.int32)
    made: dict[str, torch.Tensor] = {}
    plain = torch.empty

    def kept(*shape, **options):
        made[f"made {len(made)}"] = plain(*shape, **options)
        return made[f"made {len(made) - 1}"]

    tensors = {"k": batch.k_cache, "v": batch.v_cache, "q": batch.query, "out": out, "prefix": prefix}
    tensors |= {"tables": batch.meta.block_tables, "lens": batch.meta.seq_lens}
    monkeypatch.setattr(torch, "empty", kept)
    with trace(made, **tensors) as traffic:
        OPS.cascade_decode(
            batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens, prefix,
            scale=0.125, out=out,
        )  # fmt: skip
    ideal = (shared + sum(length - shared for length in lengths)) * kv_heads * 64 * 2
    for name in ("k", "v"):
        assert traffic[name].loaded_bytes == ideal
        assert traffic[name].sectors == traffic[name].unique_sectors


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
