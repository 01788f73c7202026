"""Paged attention of every backend against a float64 oracle; unused pages hold NaN throughout."""

import itertools

import pytest
import torch

from kvctl_kernels.metadata import AttentionMetadata
from tests.kernels.conftest import NATIVE_BUILDS
from tests.kernels.oracle import TOLERANCE, attention64, paged_batch, relative_error

GROUPS, HEAD_DIMS, BLOCK_SIZES, WINDOWS, SOFT_CAPS = (
    (1, 3, 4, 7, 8),
    (64, 96, 128, 256),
    (1, 16, 32),
    (None, 7, 70),
    (None, 5.0),
)
# Every pair of values of two axes meets somewhere: a Latin walk instead of all 360 combinations.
GRID = [
    (group, HEAD_DIMS[(i + j) % 4], BLOCK_SIZES[(i + 2 * j) % 3], WINDOWS[(i + j + k) % 3], SOFT_CAPS[(i + k) % 2])
    for (i, group), j, k in itertools.product(enumerate(GROUPS), range(4), range(2))
]
DECODE_AND_PREFILL = ([1, 1, 1, 1, 5, 37, 1, 130], [1, 17, 65, 300, 5, 101, 40, 200])
BACKENDS = [
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
    ("torch", torch.float16),
    *[(build, dtype) for build in NATIVE_BUILDS for dtype in (torch.float32, torch.bfloat16)],
]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_attention_equals_float64(backend, dtype, make_ops):
    ops = make_ops(backend, dtype)
    grid = GRID[::3] if backend == "torch" else GRID if backend == "native" else GRID[::6]
    for group, head_dim, block_size, window, soft_cap in grid:
        batch = paged_batch(
            *DECODE_AND_PREFILL,
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            block_size=block_size,
            dtype=dtype,
            window=window,
        )
        scale = head_dim**-0.5
        got = ops.paged_attention(
            batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=scale, window=window, soft_cap=soft_cap
        )
        want = attention64(batch, scale=scale, window=window, soft_cap=soft_cap)
        error = relative_error(got, want)
        assert error < TOLERANCE[dtype], (group, head_dim, block_size, window, soft_cap, error)


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("length", [63, 64, 65, 255, 256, 257, 1025])
def test_lengths_around_tile_and_split_ends(backend, length, make_ops):
    batch = paged_batch(
        [1, length], [length, length], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    got = make_ops(backend, torch.float32).paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=0.125
    )
    assert relative_error(got, attention64(batch, scale=0.125, window=None, soft_cap=None)) < 2e-6


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_scores_far_apart_do_not_overflow(backend, make_ops):
    batch = paged_batch(
        [1, 30], [300, 90], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32
    )
    got = make_ops(backend, torch.float32).paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=40.0
    )
    assert relative_error(got, attention64(batch, scale=40.0, window=None, soft_cap=None)) < 2e-5


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_head_size_no_vector_divides(backend, make_ops):
    batch = paged_batch([1, 9], [33, 20], num_heads=4, num_kv_heads=2, head_dim=40, block_size=8, dtype=torch.float32)
    got = make_ops(backend, torch.float32).paged_attention(
        batch.query, batch.k_cache, batch.v_cache, batch.meta, scale=0.2
    )
    assert relative_error(got, attention64(batch, scale=0.2, window=None, soft_cap=None)) < 2e-6


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_query_may_be_a_view_of_a_wider_row(backend, make_ops):
    batch = paged_batch([1, 9], [33, 20], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    wide = torch.full((10, 8, 64), float("nan"))
    wide[:, 2:6] = batch.query
    ops = make_ops(backend, torch.float32)
    got, want = (
        ops.paged_attention(query, batch.k_cache, batch.v_cache, batch.meta, scale=0.125)
        for query in (wide[:, 2:6], batch.query)
    )
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_batch_of_nothing_gives_nothing(backend, make_ops):
    batch = paged_batch([1], [5], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    empty = AttentionMetadata.from_lists([], [], [], 16)
    got = make_ops(backend, torch.float32).paged_attention(
        batch.query[:0], batch.k_cache, batch.v_cache, empty, scale=1.0
    )
    assert got.shape == (0, 4, 64)


def part_of(batch, pieces):
    """The same sequence, asked about in pieces (query_len, seq_len), as a batch of several requests."""
    table = batch.meta.block_tables[0].tolist()
    meta = AttentionMetadata.from_lists([table] * len(pieces), [q for q, _ in pieces], [s for _, s in pieces], 16)
    return torch.cat([batch.query[s - q : s] for q, s in pieces]), meta


@pytest.mark.parametrize("build", NATIVE_BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "soft_cap"), [(3, 64, None, None), (4, 128, 50, None), (1, 96, 300, 5.0)]
)
def test_native_result_of_a_token_is_the_same_bit_for_bit_however_it_is_batched(
    build, dtype, group, head_dim, window, soft_cap, make_ops
):
    length = 700
    batch = paged_batch(
        [length], [length], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=dtype
    )
    arguments = {"scale": head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    whole = make_ops(build, dtype).paged_attention(batch.query, batch.k_cache, batch.v_cache, batch.meta, **arguments)
    batches = [
        [(1, s) for s in (1, 2, 63, 64, 65, 256, 257, 511, 600, 700)],
        [(1, 700)],
        [(1, 5), (1, 700), (3, 600), (8, 700), (9, 500), (100, 300)],
        [(300, 300), (200, 500), (200, 700)],
        [(1, s) for s in range(500, 540)],
    ]
    for pieces, num_threads in itertools.product(batches, (1, 3)):
        query, meta = part_of(batch, pieces)
        got = make_ops(build, dtype, num_threads).paged_attention(
            query, batch.k_cache, batch.v_cache, meta, **arguments
        )
        assert torch.equal(got, torch.cat([whole[s - q : s] for q, s in pieces])), (pieces, num_threads)


def test_metadata_refuses_lists_that_contradict_each_other():
    with pytest.raises(ValueError, match="do not fit"):
        AttentionMetadata.from_lists([[1]], [1], [17], 16)
    with pytest.raises(ValueError, match="do not fit"):
        AttentionMetadata.from_lists([[1]], [5], [4], 16)
    with pytest.raises(ValueError, match="differ"):
        AttentionMetadata.from_lists([[1]], [1, 1], [4], 16)


def test_metadata_counts_only_leading_decodes():
    meta = AttentionMetadata.from_lists([[1], [2], [3], [4]], [1, 1, 3, 1], [4, 1, 3, 2], 16)
    assert meta.num_decode_requests == 2
    assert meta.slot_mapping.tolist() == [19, 32, 48, 49, 50, 65]
    assert meta.query_start_loc.tolist() == [0, 1, 2, 5, 6]
