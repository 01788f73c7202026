"""Bits of number formats, against the sizes that gguf and safetensors themselves use."""

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import ConfigError
from kvctl.model.dtypes import element_bits, ggml_bytes, kv_format, safetensors_bits


@pytest.mark.parametrize("kind", [k for k in gguf.GGMLQuantizationType if ggml_bytes(k.name, 256) is not None])
def test_ggml_blocks_have_the_bytes_that_the_gguf_package_gives_them(kind: gguf.GGMLQuantizationType) -> None:
    elements, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    assert ggml_bytes(kind.name, elements * 12) == n_bytes * 12


def test_every_common_ggml_format_is_known() -> None:
    for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_XS", "F16", "BF16", "MXFP4"):
        assert ggml_bytes(name, 256) is not None


def test_fp8_kv_has_one_byte_and_no_scales_in_the_pool() -> None:
    assert kv_format("fp8", "bfloat16").vector_bytes(128) == 128


def test_nvfp4_kv_carries_one_scale_byte_per_sixteen_elements() -> None:
    assert kv_format("nvfp4", "bfloat16").vector_bytes(128) == 64 + 8


def test_int8_kv_carries_a_float32_scale_per_head_and_side() -> None:
    assert kv_format("int8", "bfloat16").vector_bytes(128) == 132


def test_auto_kv_is_the_models_own_format() -> None:
    assert kv_format("auto", "float32").bits == 32
    assert kv_format("auto", "torch.bfloat16").bits == 16


@pytest.mark.parametrize("name", ["", "fp3", "zork", "float64x"])
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        kv_format(name or "none", "bfloat16")
    with pytest.raises(ConfigError):
        element_bits(name)


def test_unknown_safetensors_dtype_has_no_size() -> None:
    assert safetensors_bits("F5") is None


@given(st.integers(1, 4096))
def test_more_elements_never_take_fewer_bytes(count: int) -> None:
    fmt = kv_format("nvfp4", "bfloat16")
    assert fmt.vector_bytes(count + 1) >= fmt.vector_bytes(count)
