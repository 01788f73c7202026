"""Repairs of Triton's interpreter, so that bfloat16 and float8 kernels can be checked on a machine without a GPU.

Unrepaired (Triton 3.6 to 3.9) a bfloat16 dot multiplies bit patterns, bfloat16 arithmetic likewise, casts to
bfloat16 truncate, and casts to float8 carry wrongly: all silently. `repair()` sends casts through torch's dtypes and
bfloat16 through float32. `tests/kernels/test_triton_interpreter.py` pins what is repaired.

`tests/conftest.py` turns the interpreter on before anything imports triton. Ahead-of-time compilation needs it off
and therefore runs in processes of its own.
"""

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0}
_CARRIER = {torch.bfloat16: torch.uint16, **dict.fromkeys(_LARGEST, torch.uint8)}


def _to_torch(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(data))
    return tensor.view(dtype) if dtype in _CARRIER else tensor


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    carrier = _CARRIER.get(tensor.dtype)
    return (tensor.view(carrier) if carrier is not None else tensor).numpy()


def _convert(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Convert as CUDA does: to nearest even, float8 saturating, NaN kept."""
    wide = _to_torch(data, _TORCH[source])
    dtype = _TORCH[target]
    if dtype in _LARGEST:
        wide = wide.float().clamp(-_LARGEST[dtype], _LARGEST[dtype])  # torch's clamp keeps NaN
    elif wide.dtype in _LARGEST:
        wide = wide.float()
    return _to_numpy(wide.to(dtype)).reshape(data.shape)


def repair() -> None:
    """Patch the interpreter of this process; safe to call twice."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "is_repaired", False):
        return
    handle = interpreter.TensorHandle
    plain_cast, plain_fp, plain_binary = builder.cast_impl, builder.create_fp_to_fp, builder.binary_op

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in _TORCH and target in _TORCH:
            return handle(_convert(src.data, source, target), target)
        if source in _TORCH and _TORCH[source] in _CARRIER:  # bfloat16 or float8 to an integer
            src = handle(_convert(src.data, source, tl.float32), tl.float32)
        elif target in _TORCH and _TORCH[target] in _CARRIER:  # and back
            wide = handle(src.data.astype(np.float32), tl.float32)
            return handle(_convert(wide.data, tl.float32, target), target)
        return plain_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source in _TORCH and target in _TORCH:
            return handle(_convert(src.data, source, target), target)
        return plain_fp(self, src, dst_type, rounding_mode)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left = _convert(a.data, a.dtype.scalar, tl.float32) if a.dtype.scalar in _TORCH else a.data
        right = _convert(b.data, b.dtype.scalar, tl.float32) if b.dtype.scalar in _TORCH else b.data
        return handle(np.matmul(left, right, dtype=d.data.dtype) + d.data, d.dtype.scalar)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar == tl.bfloat16 and rhs.dtype.scalar == tl.bfloat16:
            wide = op(_convert(lhs.data, tl.bfloat16, tl.float32), _convert(rhs.data, tl.bfloat16, tl.float32))
            if wide.dtype == np.float32:
                return handle(_convert(wide, tl.float32, tl.bfloat16), tl.bfloat16)
            return handle(wide, lhs.dtype.scalar)
        return plain_binary(self, lhs, rhs, op)

    plain_patch = interpreter._patch_lang_core

    def patch_lang_core(lang: Any, *rest: Any) -> Any:
        """Triton 3.6's interpreter knows AMD's e4m3, but not its name."""
        result = plain_patch(lang, *rest)
        plain_type = lang.dtype.to_ir
        lang.dtype.to_ir = lambda self, builder: (
            builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else plain_type(self, builder)
        )
        return result

    interpreter._patch_lang_core = patch_lang_core
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot = create_dot
    builder.binary_op = binary_op
    builder.is_repaired = True
