"""Norms, gates, rotation and KV store of every backend against float64 numpy."""

import math

import numpy as np
import pytest
import torch

from tests.kernels.conftest import NATIVE_BUILDS
from tests.kernels.oracle import TOLERANCE, relative_error

BACKENDS = [
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
    *[(build, dtype) for build in NATIVE_BUILDS for dtype in (torch.float32, torch.bfloat16)],
]


def random(*shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def norm64(x, weight, eps):
    x, weight = x.double().numpy(), weight.double().numpy()
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_rms_norm(backend, dtype, make_ops):
    ops = make_ops(backend, dtype)
    for rows, width in ((1, 576), (7, 64), (300, 129), (2, 5), (0, 64)):
        x, weight = random(rows, width, dtype=dtype, scale=3), random(width, dtype=dtype, seed=1)
        assert relative_error(ops.rms_norm(x, weight, 1e-5), norm64(x, weight, 1e-5)) < TOLERANCE[dtype]
        more = random(rows, width, dtype=dtype, seed=2)
        normed, total = ops.rms_norm_residual(x, more, weight, 1e-5)
        assert torch.equal(total, x + more)
        assert relative_error(normed, norm64(total, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_rms_norm_of_heads_inside_a_wider_row(backend, dtype, make_ops):
    wide = random(6, 9, 64, dtype=dtype)
    weight = random(64, dtype=dtype, seed=1)
    got = make_ops(backend, dtype).rms_norm(wide[:, 2:5], weight, 1e-6)
    assert relative_error(got, norm64(wide[:, 2:5], weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_gates(backend, dtype, make_ops):
    ops = make_ops(backend, dtype)
    for rows, width in ((1, 1536), (33, 50), (200, 64), (0, 64)):
        x = random(rows, 2 * width, dtype=dtype, scale=4)
        gate, up = np.split(x.double().numpy(), 2, axis=1)
        silu = gate / (1 + np.exp(-gate)) * up
        gelu = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        assert relative_error(ops.silu_and_mul(x), silu) < TOLERANCE[dtype]
        assert relative_error(ops.gelu_tanh_and_mul(x), gelu) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["torch", *NATIVE_BUILDS])
def test_gates_of_extreme_values_stay_finite(backend, make_ops):
    x = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e10, -1e10] + [1.0] * 8])
    ops = make_ops(backend, torch.float32)
    assert torch.allclose(ops.silu_and_mul(x), torch.tensor([[0, 0, 0, 0, 88.0, 200.0, 1e10, 0]]), atol=1e-30)
    assert torch.allclose(ops.gelu_tanh_and_mul(x)[0, 1:6], torch.tensor([0, 0, 0, 88.0, 200.0]))


def rotate64(x, positions, table, rot_dim):
    x = x.double().numpy().copy()
    half = rot_dim // 2
    cos = table[positions, :half].double().numpy()[:, None]
    sin = table[positions, half:].double().numpy()[:, None]
    first, second = x[..., :half].copy(), x[..., half:rot_dim].copy()
    x[..., :half] = first * cos - second * sin
    x[..., half:rot_dim] = second * cos + first * sin
    return x


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize(
    ("head_dim", "rot_dim", "block_size"), [(64, 64, 16), (96, 96, 1), (64, 24, 5), (128, 128, 32)]
)
def test_rotary_and_store(backend, dtype, head_dim, rot_dim, block_size, make_ops):
    ops = make_ops(backend, dtype)
    num_tokens, num_heads, num_kv_heads, num_blocks = 40, 6, 2, 60
    wide = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    query, key, value = wide.clone().split_with_sizes([num_heads, num_kv_heads, num_kv_heads], dim=1)
    angles = torch.rand(100, rot_dim // 2, generator=torch.Generator().manual_seed(3)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    rng = np.random.default_rng(0)
    positions = torch.from_numpy(rng.integers(0, 100, num_tokens))
    slots = torch.from_numpy(rng.permutation(np.arange(block_size, num_blocks * block_size))[:num_tokens])
    skipped = [3, 17, 39]
    slots[skipped] = -1
    want_query = rotate64(query, positions, table, rot_dim)
    want_key = rotate64(key, positions, table, rot_dim)
    want_value = value.clone()
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    k_cache, v_cache = torch.full(shape, 7.0, dtype=dtype), torch.full(shape, 7.0, dtype=dtype)

    got = ops.rotary_and_store_kv(query, key, value, positions, table, k_cache, v_cache, slots)

    assert relative_error(got, want_query) < TOLERANCE[dtype]
    written = slots >= 0
    block, offset = slots[written] // block_size, slots[written] % block_size
    assert relative_error(k_cache[block, :, offset], want_key[written.numpy()]) < TOLERANCE[dtype]
    assert torch.equal(v_cache[block, :, offset], want_value[written])
    for cache in (k_cache, v_cache):  # nothing else was touched; the null block may be
        untouched = torch.ones(num_blocks, block_size, dtype=torch.bool)
        untouched[block, offset] = False
        untouched[0] = False
        assert (cache.transpose(1, 2)[untouched] == 7.0).all()


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_rotary_alone_and_store_alone_equal_both_at_once(backend, dtype, make_ops):
    ops = make_ops(backend, dtype)
    query, key, value = (random(9, heads, 64, dtype=dtype, seed=heads) for heads in (4, 2, 2))
    table = random(50, 64, dtype=torch.float32)
    positions, slots = torch.arange(9) * 5, torch.arange(16, 25)
    once = [torch.zeros(4, 2, 16, 64, dtype=dtype) for _ in range(2)]
    apart = [torch.zeros(4, 2, 16, 64, dtype=dtype) for _ in range(2)]
    both = ops.rotary_and_store_kv(query.clone(), key.clone(), value, positions, table, *once, slots)
    turned_query, turned_key = ops.rotary(query.clone(), key.clone(), positions, table)
    ops.store_kv(turned_key, value, *apart, slots)
    assert torch.equal(both, turned_query)
    assert torch.equal(once[0], apart[0])
    assert torch.equal(once[1], apart[1])


def test_bfloat16_rounds_to_nearest_even_and_keeps_nan(make_ops):
    # Multiplying by one and adding zero leaves the rounding alone to be seen: residual sums are rounded once.
    for build in NATIVE_BUILDS:
        ops = make_ops(build, torch.bfloat16)
        a = random(64, 128, dtype=torch.bfloat16, scale=100)
        b = random(64, 128, dtype=torch.bfloat16, seed=1, scale=0.3)
        a[0, 0], a[1, 1] = float("nan"), float("inf")
        _, total = ops.rms_norm_residual(a, b, torch.ones(128, dtype=torch.bfloat16), 1e-6)
        want = (a.float() + b.float()).bfloat16()
        assert torch.equal(total.isnan(), want.isnan())
        assert torch.equal(total.nan_to_num(), want.nan_to_num())
