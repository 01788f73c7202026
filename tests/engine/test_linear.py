"""Every linear backend against a float64 product, and what they promise about batches and memory."""

import pytest
import torch

from kvctl.engine.layers.linear import Linear, OneDnnLinears, TorchLinears, _has_onednn, select_linears
from kvctl.errors import ConfigError

SHAPES = [(1, 2), (31, 64), (32, 576), (33, 96), (100, 48), (960, 576), (576, 1536)]
ROWS = [1, 2, 3, 4, 5, 7, 12, 13, 25, 40, 101]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # bfloat16 keeps 8 bits of the result


def backend(name, dtype):
    if name == "native":
        return select_linears("cpu", dtype, "native", num_threads=2)
    if name == "onednn":
        if not _has_onednn():
            pytest.fail("this CPU or this torch has no oneDNN bfloat16 operators; the fallback tests cover that case")
        return OneDnnLinears()
    return TorchLinears()


def random(shape, dtype, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("native", torch.float32), ("native", torch.bfloat16), ("onednn", torch.bfloat16), ("torch", torch.float32)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_equals_float64(name, dtype, with_bias):
    chosen = backend(name, dtype)
    for outputs, inputs in SHAPES:
        weight = random((outputs, inputs), dtype, 1)
        bias = random((outputs,), dtype, 2) if with_bias else None
        linear = Linear(weight, bias, chosen)
        linear.prepack()
        for rows in ROWS:
            x = random((rows, inputs), dtype, rows)
            want = x.double() @ weight.double().T + (bias.double() if with_bias else 0)
            assert relative(linear(x), want) < TOLERANCE[dtype], (outputs, inputs, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_native_row_is_the_same_bit_for_bit_in_any_batch(dtype, num_threads):
    weight = random((200, 1536), dtype, 1)
    x = random((60, 1536), dtype, 2)
    linear = Linear(weight, None, select_linears("cpu", dtype, "native", num_threads=num_threads))
    linear.prepack()
    alone = torch.cat([linear(x[i : i + 1]) for i in range(60)])
    for rows in range(1, 61):
        assert torch.equal(linear(x[:rows]), alone[:rows])


@pytest.mark.parametrize("name", ["native", "onednn", "torch"])
def test_rows_of_a_packed_weight_are_exact(name):
    weight = random((77, 64), torch.bfloat16)
    linear = Linear(weight, None, backend(name, torch.bfloat16))
    linear.prepack()
    indices = torch.tensor([0, 76, 31, 32, 33, 5, 5])
    assert torch.equal(linear.rows(indices), weight[indices])
    with pytest.raises(IndexError):
        linear.rows(torch.tensor([0, 77]))


def test_native_takes_rows_of_a_wider_tensor():
    weight = random((40, 64), torch.bfloat16)
    linear = Linear(weight, None, select_linears("cpu", torch.bfloat16, "native"))
    linear.prepack()
    wide = random((9, 200), torch.bfloat16)
    for view in (wide[:, 4:68], wide[:, 3:67], wide.T[:64].T, random((9, 65), torch.bfloat16)[:, :64]):
        assert torch.equal(linear(view), linear(view.clone().contiguous()))


def test_native_keeps_one_copy_of_the_weight():
    weight = random((960, 576), torch.bfloat16)
    linear = Linear(weight, None, select_linears("cpu", torch.bfloat16, "native"))
    linear.prepack()
    assert linear.weight is None
    assert linear.packed.packed_bytes == weight.numel() * 2


def test_native_refuses_an_input_of_another_width_or_dtype():
    linear = Linear(random((40, 64), torch.float32), None, select_linears("cpu", torch.float32, "native"))
    linear.prepack()
    with pytest.raises(ValueError, match="takes"):
        linear(random((2, 60), torch.float32))
    with pytest.raises(ValueError, match="takes"):
        linear(random((2, 64), torch.bfloat16))


def test_a_weight_without_a_packed_form_is_multiplied_by_torch():
    weight = random((40, 63), torch.bfloat16)
    linear = Linear(weight, None, select_linears("cpu", torch.bfloat16, "native"))
    linear.prepack()
    x = random((3, 63), torch.bfloat16)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))


def test_no_rows_give_no_rows():
    linear = Linear(random((40, 64), torch.float32), None, select_linears("cpu", torch.float32, "native"))
    linear.prepack()
    assert linear(torch.empty(0, 64)).shape == (0, 40)
    assert linear.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 64)


def test_half_precision_is_left_to_torch_with_the_reason():
    chosen = select_linears("cpu", torch.float16)
    assert chosen.name == "torch"
    assert "float16" in chosen.reason
    with pytest.raises(ConfigError, match="float16"):
        select_linears("cpu", torch.float16, "native")


def test_the_user_may_ask_for_torch():
    assert select_linears("cpu", torch.bfloat16, "torch").name == "torch"
    assert select_linears("cpu", torch.bfloat16, "torch").reason == ""
