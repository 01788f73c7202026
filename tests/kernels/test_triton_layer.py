"""Store, rotary, norms and gates as Triton kernels, in the interpreter, against torch in float64."""

import pytest
import torch

from kvctl_kernels.metadata import KVScales
from tests.support.triton_interpreter import repair

repair()
from kvctl_kernels.reference import TorchOps  # noqa: E402
from kvctl_kernels.triton_ops import TritonOps  # noqa: E402

# numpy warns of inf - inf and of casts that CUDA does silently; the results are what these tests look at.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

HOPPER = TritonOps("cpu", arch="sm_90", num_multiprocessors=4)
AMPERE = TritonOps("cpu", arch="sm_80", num_multiprocessors=4)
MI300 = TritonOps("cpu", arch="gfx942", num_multiprocessors=4)
REFERENCE = TorchOps()


def qkv_views(tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value as views of one fused row, as the model has them."""
    row = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    parts = row.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    return [part.view(tokens, -1, dim) for part in parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_store_kv_writes_slots_and_skips_minus_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    _, key, value = qkv_views(5, 3, 3, 40, dtype)
    slots = torch.tensor([17, -1, 0, 33, 18])
    caches = [torch.full((4, 3, 16, 40), 9.0).to(dtype) for _ in range(4)]
    HOPPER.store_kv(key, value, caches[0], caches[1], slots)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            caches[2][slot // 16, :, slot % 16] = key[token]
            caches[3][slot // 16, :, slot % 16] = value[token]
    assert torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


@pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        (HOPPER, torch.float8_e4m3fn),
        (AMPERE, torch.float8_e4m3fn),
        (HOPPER, torch.float8_e5m2),
        (AMPERE, torch.float8_e5m2),
        (MI300, torch.float8_e4m3fnuz),
    ],
    ids=["e4m3", "e4m3-bits", "e5m2", "e5m2-sm_80", "e4m3fnuz"],
)
def test_float8_stores_are_bit_exact_saturate_and_apply_scales(ops: TritonOps, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    key = torch.randn(64, 2, 64) * torch.exp2(torch.randint(-14, 12, (64, 2, 64)).float())
    key[0, 0, :8] = torch.tensor([448.0, 460.0, 500.0, -1e9, 2**-9, 2**-10, 3 * 2**-10, 0.0])
    value = key.flip(0).contiguous()
    k_scale, v_scale = torch.tensor([1.0, 4.0]), torch.tensor([0.5, 1.0])
    k_cache, v_cache = (torch.zeros(5, 2, 16, 64, dtype=torch.uint8).view(dtype) for _ in range(2))
    ops.store_kv(key, value, k_cache, v_cache, torch.arange(16, 80), KVScales(k_scale, v_scale))
    largest = torch.finfo(dtype).max
    for cache, x, scale in ((k_cache, key, k_scale), (v_cache, value, v_scale)):
        want = (x / scale[:, None]).clamp(-largest, largest).to(dtype)
        got = cache[1:].permute(0, 2, 1, 3).reshape(64, 2, 64)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_nan_is_stored_as_nan_in_float8() -> None:
    key = torch.full((1, 1, 16), float("nan"))
    for ops in (HOPPER, AMPERE):
        k_cache, v_cache = (torch.zeros(1, 1, 1, 16, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2))
        ops.store_kv(key, key, k_cache, v_cache, torch.zeros(1, dtype=torch.int64))
        assert k_cache.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rotated", [64, 32])
def test_rotary_matches_torch(dtype: torch.dtype, rotated: int) -> None:
    torch.manual_seed(2)
    query, key, _ = qkv_views(6, 6, 2, 64, dtype)
    positions = torch.tensor([0, 1, 7, 30, 31, 5])
    table = torch.randn(40, rotated)
    got, want = HOPPER.rotary(query, key, positions, table), REFERENCE.rotary(query, key, positions, table)
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("ops", [HOPPER, AMPERE], ids=["native", "bits"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (7, 1, 96), (4, 4, 128)])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
def test_norm_rotary_and_store_in_one_launch_equal_one_by_one(
    ops: TritonOps, kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int, has_norm: bool
) -> None:
    torch.manual_seed(3)
    query, key, value = qkv_views(4, heads, kv_heads, dim, torch.float32)
    positions, slots, table = torch.tensor([3, 0, 9, 2]), torch.tensor([17, -1, 3, 40]), torch.randn(10, dim)
    q_norm, k_norm = torch.randn(dim), torch.randn(dim)
    scales = None if kv_dtype == torch.float32 else KVScales(torch.rand(kv_heads) + 0.5, torch.rand(kv_heads) + 0.5)
    caches = [torch.zeros(3, kv_heads, 16, dim, dtype=torch.uint8 if scales else kv_dtype) for _ in range(4)]
    caches = [cache.view(kv_dtype) for cache in caches]
    one, two = (query, key, value, positions, table), (slots, scales)
    if has_norm:
        got = ops.norm_rotary_and_store_kv(q_norm, k_norm, 1e-6, *one, *caches[:2], *two)
        want = REFERENCE.norm_rotary_and_store_kv(q_norm, k_norm, 1e-6, *one, *caches[2:], *two)
    else:
        got = ops.rotary_and_store_kv(*one, *caches[:2], *two)
        want = REFERENCE.rotary_and_store_kv(*one, *caches[2:], *two)
    assert torch.allclose(got, want, atol=2e-6)
    for mine, theirs in zip(caches[:2], caches[2:], strict=True):  # the reference writes skipped tokens to block 0
        difference = (mine.float() - theirs.float())[1:].abs()
        # A number on the edge between two float8 codes may fall either way: one code in thousands, one step.
        assert (difference > 1e-5).float().mean() < 0.01 and (difference <= theirs.float()[1:].abs() / 4 + 1e-5).all()
    assert (caches[0].float()[0] != 0).any(dim=(0, 2)).nonzero().tolist() == [[3]], "slot -1 is stored nowhere"


def test_a_partly_rotated_head_takes_the_long_way() -> None:
    torch.manual_seed(4)
    query, key, value = qkv_views(3, 4, 2, 64, torch.float32)
    positions, slots, table = torch.tensor([3, 0, 9]), torch.tensor([1, 2, 20]), torch.randn(10, 24)
    norms = (torch.randn(64), torch.randn(64), 1e-6)
    caches = [torch.zeros(2, 2, 16, 64) for _ in range(4)]
    got = HOPPER.norm_rotary_and_store_kv(*norms, query, key, value, positions, table, *caches[:2], slots)
    want = REFERENCE.norm_rotary_and_store_kv(*norms, query, key, value, positions, table, *caches[2:], slots)
    assert torch.allclose(got, want, atol=2e-6)
    assert all(torch.allclose(caches[i], caches[i + 2], atol=2e-6) for i in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 576, 640])
def test_norms_match_float64(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(4)
    x, residual, weight = torch.randn(3, size).to(dtype), torch.randn(3, size).to(dtype), torch.randn(size).to(dtype)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2

    def norm64(values: torch.Tensor) -> torch.Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert torch.allclose(HOPPER.rms_norm(x, weight, 1e-5).double(), norm64(x), atol=tolerance, rtol=tolerance)
    total = (x.float() + residual.float()).to(dtype)
    normed, kept = HOPPER.rms_norm_residual(x, residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    assert torch.allclose(normed.double(), norm64(total), atol=tolerance, rtol=tolerance)


def test_norm_over_heads_of_a_wider_row() -> None:
    torch.manual_seed(5)
    query, _, _ = qkv_views(3, 5, 2, 64, torch.float32)
    weight = torch.randn(64)
    assert torch.allclose(HOPPER.rms_norm(query, weight, 1e-6), REFERENCE.rms_norm(query, weight, 1e-6), atol=1e-6)


@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_gates_match_float64(gelu: bool) -> None:
    torch.manual_seed(6)
    x = torch.randn(3, 2 * 1500) * 4
    got = HOPPER.gelu_tanh_and_mul(x) if gelu else HOPPER.silu_and_mul(x)
    gate, up = x.double().chunk(2, dim=-1)
    act = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    assert torch.allclose(got.double(), act * up, atol=1e-5, rtol=1e-5)
