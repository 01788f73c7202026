"""The attention kernels against float64, in the interpreter: every branch, at the edges of tiles, pages and splits.

Pages that belong to nobody, and the rest of last pages, hold NaN: a kernel that reads one token too many fails.
"""

import dataclasses

import numpy as np
import pytest
import torch

from kvctl_kernels.metadata import AttentionMetadata, KVScales
from tests.kernels.oracle import TOLERANCE, PagedBatch, attention64, paged_batch, relative_error
from tests.support.triton_interpreter import repair

repair()
from kvctl_kernels.triton_ops import TritonOps  # noqa: E402 (after the switch)

# numpy warns of inf - inf and of casts that CUDA does silently; the results are what these tests look at.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOPPER = TritonOps("cpu", arch="sm_90", num_multiprocessors=4)
AMPERE = TritonOps("cpu", arch="sm_80", num_multiprocessors=4)
MI300 = TritonOps("cpu", arch="gfx942", num_multiprocessors=4)
FLOAT8_PAGES = [
    (HOPPER, torch.float8_e4m3fn),
    (AMPERE, torch.float8_e4m3fn),
    (HOPPER, torch.float8_e5m2),
    (MI300, torch.float8_e4m3fnuz),
]
FLOAT8_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 6e-3}


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten is NaN, not what happened to stand in memory."""
    plain = torch.empty

    def poisoned(*shape, **options):
        found = plain(*shape, **options)
        return found.fill_(float("nan")) if found.dtype.is_floating_point and found.element_size() > 1 else found

    monkeypatch.setattr(torch, "empty", poisoned)


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, float("nan"))


def check(ops: TritonOps, batch: PagedBatch, *, window: int | None = None, soft_cap: float | None = None) -> None:
    scale = batch.query.shape[-1] ** -0.5
    got = ops.paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=scale, window=window, soft_cap=soft_cap
    )
    want = attention64(batch, scale=scale, window=window, soft_cap=soft_cap)
    assert not got.isnan().any()
    assert relative_error(got, want) < TOLERANCE[batch.query.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (7, 1), (8, 1)])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_decode_and_prefill_in_one_batch(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    batch = paged_batch(
        [1, 1, 1, 19], [1, 64, 131, 70],
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16, dtype=dtype,
    )  # fmt: skip
    check(HOPPER, batch)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_heads(dtype: torch.dtype, head_dim: int) -> None:
    batch = paged_batch(
        [1, 9], [33, 40], num_heads=4, num_kv_heads=1, head_dim=head_dim, block_size=16, dtype=dtype
    )  # fmt: skip
    check(HOPPER, batch)


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_any_page_size(block_size: int) -> None:
    batch = paged_batch(
        [1, 1, 5], [7, 130, 66], num_heads=4, num_kv_heads=2, head_dim=64, block_size=block_size, dtype=torch.float32
    )  # fmt: skip
    check(HOPPER, batch)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 65, 500])
def test_windows_at_the_edges_of_pages_and_tiles(window: int) -> None:
    batch = paged_batch(
        [1, 1, 35], [64, 129, 99],
        num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32, window=window,
    )  # fmt: skip
    check(HOPPER, batch, window=window)


@pytest.mark.parametrize("soft_cap", [5.0, 50.0])
def test_soft_caps(soft_cap: float) -> None:
    batch = paged_batch(
        [1, 12], [70, 40], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )  # fmt: skip
    batch.query *= 20  # so that the cap bites
    check(HOPPER, batch, soft_cap=soft_cap)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_every_split_of_every_length_gives_the_same(length: int, splits: int) -> None:
    batch = paged_batch(
        [1], [length], num_heads=2, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32
    )  # fmt: skip
    lse = torch.full((1, 2), float("nan"))
    got = HOPPER.paged_decode(
        batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens,
        scale=0.125, splits=splits, lse=lse,
    )  # fmt: skip
    assert relative_error(got, attention64(batch, scale=0.125, window=None, soft_cap=None)) < 2e-6
    scores = np.einsum("hd,ld->hl", batch.query[0].double().numpy(), batch.keys[0][:, 0]) * 0.125
    assert np.allclose(lse[0].numpy(), np.log2(np.exp(scores).sum(axis=1)), rtol=1e-5)


@pytest.mark.parametrize("query_lens", [[1], [31], [32], [33], [64, 1, 2], [5, 40, 1, 1]])
def test_query_blocks_find_their_request(query_lens: list[int]) -> None:
    batch = paged_batch(
        query_lens, [length + 10 * i for i, length in enumerate(query_lens)],
        num_heads=4, num_kv_heads=1, head_dim=64, block_size=16, dtype=torch.float32,
    )  # fmt: skip
    batch.meta = AttentionMetadata(  # all through the prefill kernel, one-token requests too
        batch.meta.block_tables, batch.meta.query_start_loc, batch.meta.seq_lens, batch.meta.slot_mapping, 0,
        batch.meta.max_query_len, batch.meta.max_seq_len, batch.meta.query_lens_list, batch.meta.seq_lens_list,
    )  # fmt: skip
    check(HOPPER, batch)


# ---- float8 pages ----


def in_float8(batch: PagedBatch, dtype: torch.dtype, k_scale: torch.Tensor, v_scale: torch.Tensor) -> PagedBatch:
    """The same batch with float8 pages; the oracle's keys and values become what those pages say."""
    for cache, scale in ((batch.k_cache, k_scale), (batch.v_cache, v_scale)):
        cache /= scale.view(1, -1, 1, 1)
    batch.k_cache = batch.k_cache.float().clamp(-240, 240).to(dtype)
    batch.v_cache = batch.v_cache.float().clamp(-240, 240).to(dtype)
    for request, table in enumerate(batch.meta.block_tables.tolist()):
        for position in range(len(batch.keys[request])):
            block, offset = table[position // 16], position % 16
            batch.keys[request][position] = (batch.k_cache[block, :, offset].double() * k_scale[:, None]).numpy()
            batch.values[request][position] = (batch.v_cache[block, :, offset].double() * v_scale[:, None]).numpy()
    return batch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ops", "kv_dtype"),
    FLOAT8_PAGES,
    ids=["e4m3", "e4m3-bits", "e5m2", "e4m3fnuz"],
)
def test_float8_pages_with_scales_per_head(ops: TritonOps, kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25])
    batch = paged_batch(
        [1, 1, 18], [5, 70, 40], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype
    )  # fmt: skip
    batch = in_float8(batch, kv_dtype, k_scale.to(dtype), v_scale.to(dtype))
    got = ops.paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=0.125, scales=KVScales(k_scale, v_scale)
    )
    want = attention64(batch, scale=0.125, window=None, soft_cap=None)
    assert relative_error(got, want) < FLOAT8_TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("ops", "kv_dtype"),
    FLOAT8_PAGES,
    ids=["e4m3", "e4m3-bits", "e5m2", "e4m3fnuz"],
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "soft_cap"),
    [
        (7, 1, 64, None, None),
        (4, 2, 128, 40, None),
        (8, 1, 96, 17, 30.0),
        (2, 1, 256, None, None),
        (3, 3, 256, 33, 50.0),
    ],
)
def test_float8_pages_of_every_head_with_windows_and_caps(
    ops: TritonOps, kv_dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int,
    window: int | None, soft_cap: float | None,
) -> None:  # fmt: skip
    batch = paged_batch(
        [1, 1, 9], [7, 66, 35], num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=16,
        dtype=torch.float16,
    )  # fmt: skip
    scale = torch.full((kv_heads,), 0.75)
    batch = in_float8(batch, kv_dtype, scale.half(), scale.half())
    got = ops.paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=head_dim**-0.5, window=window, soft_cap=soft_cap,
        scales=KVScales(scale, scale),
    )  # fmt: skip
    want = attention64(batch, scale=head_dim**-0.5, window=window, soft_cap=soft_cap)
    assert relative_error(got, want) < FLOAT8_TOLERANCE[torch.float16]


# ---- merging ----


def test_merging_parts_equals_attending_to_all_at_once() -> None:
    batch = paged_batch([1, 1], [90, 40], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    whole, whole_lse = (nan_like(x) for x in (batch.query, torch.empty(2, 4)))
    args = (batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens)
    HOPPER.paged_decode(*args, scale=0.125, splits=1, out=whole, lse=whole_lse)
    for splits in (2, 3, 5):
        lse = nan_like(whole_lse)
        merged = HOPPER.paged_decode(*args, scale=0.125, splits=splits, lse=lse)
        assert torch.allclose(merged, whole, atol=1e-6) and torch.allclose(lse, whole_lse, atol=1e-5)
    assert relative_error(whole, attention64(batch, scale=0.125, window=None, soft_cap=None)) < 2e-6


def test_empty_parts_weigh_nothing_whatever_they_hold() -> None:
    parts = torch.randn(1, 2, 3, 64)
    parts[:, :, 1] = float("nan")
    lse = torch.tensor([[[1.0, float("-inf"), 1.0], [float("-inf")] * 3]])
    out, out_lse = torch.empty(1, 2, 64), torch.empty(1, 2)
    HOPPER.merge_attention_states(parts, lse, out=out, lse=out_lse)
    assert torch.allclose(out[0, 0], (parts[0, 0, 0] + parts[0, 0, 2]) / 2, atol=1e-6)
    assert torch.equal(out[0, 1], torch.zeros(64))
    assert out_lse.tolist() == [[2.0, float("-inf")]]


def test_merging_is_associative() -> None:
    torch.manual_seed(0)
    parts, lse = torch.randn(1, 1, 4, 64), torch.randn(1, 1, 4) * 5
    whole, whole_lse = torch.empty(1, 1, 64), torch.empty(1, 1)
    HOPPER.merge_attention_states(parts, lse, out=whole, lse=whole_lse)
    halves, half_lse = torch.empty(1, 1, 2, 64), torch.empty(1, 1, 2)
    for half in range(2):
        out, out_lse = torch.empty(1, 1, 64), torch.empty(1, 1)
        part = slice(2 * half, 2 * half + 2)
        HOPPER.merge_attention_states(
            parts[:, :, part].contiguous(), lse[:, :, part].contiguous(), out=out, lse=out_lse
        )
        halves[:, :, half], half_lse[:, :, half] = out, out_lse
    again, again_lse = torch.empty(1, 1, 64), torch.empty(1, 1)
    HOPPER.merge_attention_states(halves, half_lse, out=again, lse=again_lse)
    assert torch.allclose(again, whole, atol=1e-6) and torch.allclose(again_lse, whole_lse, atol=1e-6)


# ---- cascade: many requests over one cached prefix ----


def prefix_of(num_requests: int, shared_tokens: int) -> torch.Tensor:
    return torch.tensor([0, num_requests, shared_tokens], dtype=torch.int32)


def with_shared_prefix(batch: PagedBatch, num_blocks: int) -> PagedBatch:
    """Let all requests start with the first one's blocks."""
    shared = num_blocks * 16
    tables = batch.meta.block_tables
    tables[:, :num_blocks] = tables[0, :num_blocks]
    for keys, values in zip(batch.keys[1:], batch.values[1:], strict=True):
        keys[:shared], values[:shared] = batch.keys[0][:shared], batch.values[0][:shared]
    batch.meta = dataclasses.replace(batch.meta, shared_prefix=prefix_of(len(tables), shared))
    return batch


@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("lengths", [[80, 100, 65], [64, 64, 64]])
def test_cascade_equals_attention_over_everything(lengths: list[int], soft_cap: float | None) -> None:
    batch = paged_batch([1] * 3, lengths, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    batch = with_shared_prefix(batch, 4)
    out = HOPPER.cascade_decode(
        batch.query, batch.k_cache, batch.v_cache, batch.meta.block_tables, batch.meta.seq_lens,
        batch.meta.shared_prefix, scale=0.125, soft_cap=soft_cap, out=torch.empty_like(batch.query),
    )  # fmt: skip
    assert relative_error(out, attention64(batch, scale=0.125, window=None, soft_cap=soft_cap)) < 2e-6


def test_a_batch_with_a_shared_prefix_is_computed_as_a_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = paged_batch([1, 1, 5], [70, 90, 20], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16,
                        dtype=torch.float32)  # fmt: skip
    calls: list[torch.Tensor] = []
    real = TritonOps.cascade_decode

    def spy(self, *args, **kwargs):
        calls.append(args[5])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(TritonOps, "cascade_decode", spy)
    batch.meta.block_tables[1, :4] = batch.meta.block_tables[0, :4]
    batch.keys[1][:64], batch.values[1][:64] = batch.keys[0][:64], batch.values[0][:64]
    check(HOPPER, batch)
    assert not calls
    batch.meta = dataclasses.replace(batch.meta, shared_prefix=prefix_of(2, 64))
    check(HOPPER, batch)
    assert [prefix.tolist() for prefix in calls] == [[0, 2, 64]]
    check(HOPPER, batch, window=500)
    assert len(calls) == 1, "a window may have passed the prefix"
