"""The portable builds of the native linear; the one for this CPU is tested with the other backends."""

import pytest
import torch

from tests.kernels.conftest import NATIVE_BUILDS
from tests.kernels.oracle import TOLERANCE, relative_error


@pytest.mark.parametrize("build", NATIVE_BUILDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_rows(build, dtype, make_linears):
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs in ((32, 64), (77, 96), (5, 2), (200, 576)):
        weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
        weight, bias = weight.to(dtype), bias.to(dtype)
        linear = make_linears(build).pack(weight, bias)
        x = torch.randn(29, inputs, generator=generator).to(dtype)
        want = (x.double() @ weight.double().T + bias.double()).numpy()
        for rows in (1, 2, 3, 4, 11, 29):
            assert relative_error(linear(x[:rows]), want[:rows]) < TOLERANCE[dtype]
            assert torch.equal(linear(x[:rows]), linear(x)[:rows])
        assert torch.equal(linear.rows(torch.arange(outputs)), weight)
