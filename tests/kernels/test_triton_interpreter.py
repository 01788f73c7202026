"""The repaired interpreter computes as a GPU does. Unrepaired, each of these is silently wrong."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.triton_interpreter import repair

repair()

# numpy warns of inf - inf and of casts that CUDA does silently; the results are what these tests look at.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz]


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(y_ptr.dtype.element_ty))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def _multiply_add(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(c_ptr + at, a * b + a)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    _cast[(1,)](x, y, N=x.numel())
    return y


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    carrier = torch.uint8 if got.element_size() == 1 else torch.int16
    is_nan = want.float().isnan()
    return bool(((got.view(carrier) == want.view(carrier)) | (is_nan & got.float().isnan())).all())


def numbers(count: int = 4096) -> torch.Tensor:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 448.0, 465.0, 500.0, -1e9, 57344.0, 61440.0, 1e30, 2**-9, 2**-10, 2**-17, 1e-9])
    x = torch.randn(count) * torch.exp2(torch.randint(-20, 17, (count,)).float())
    x[: len(special)] = special
    x[-1] = float("nan")
    return x


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_casts_to_bfloat16_round_to_nearest_even(source: torch.dtype) -> None:
    x = numbers().to(source)
    assert same_bits(cast(x, torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=str)
def test_casts_to_float8_saturate_and_keep_nan(dtype: torch.dtype, source: torch.dtype) -> None:
    x = numbers().to(source)
    largest = torch.finfo(dtype).max
    assert same_bits(cast(x, dtype), x.float().clamp(-largest, largest).to(dtype))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_float8_codes_are_read_right(dtype: torch.dtype, target: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    got, want = cast(codes, target).float(), codes.to(torch.float32)
    finite = want.isfinite()
    assert torch.equal(got[finite], want[finite])


def test_bfloat16_dots_multiply_numbers_not_bit_patterns() -> None:
    torch.manual_seed(1)
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 16).bfloat16()
    c = torch.empty(16, 16)
    _dot[(1,)](a, b, c, N=16)
    assert torch.allclose(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


def test_bfloat16_arithmetic_rounds_after_each_operation() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    c = torch.empty(64, dtype=torch.bfloat16)
    _multiply_add[(1,)](a, b, c, N=64)
    assert torch.equal(c, a * b + a)
