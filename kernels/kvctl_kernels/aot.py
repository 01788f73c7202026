"""Compile every kernel of the table for every architecture without a GPU, and read what came out.

Knows nothing of running kernels. Each case mirrors the specialisation a launch makes (pointer and stride
divisibility, constants), without which the result is not the real kernel: registers, spills and vector loads differ.
Registers and shared memory come from the tools that Triton brings along (`cuobjdump`, `nvdisasm`) or, for AMD, from
the assembly's own notes. Must run with TRITON_INTERPRET unset.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvctl_kernels import triton_attention, triton_layer, triton_sampling
from kvctl_kernels.configs import (
    ARCHS,
    SHARED_LIMIT_BYTES,
    SMALLEST_SM8X_BYTES,
    Arch,
    AttentionConfig,
    block_dim,
    decode_config,
    dot_precision,
    prefill_config,
)

HEAD_DIMS = (64, 96, 128, 256)
GROUP = 4
PAGE = 16
FUNCTIONS = {
    "paged_decode": triton_attention.paged_decode_kernel,
    "paged_prefill": triton_attention.paged_prefill_kernel,
    "merge_attention_states": triton_attention.merge_attention_states_kernel,
    "store_kv": triton_layer.store_kv_kernel,
    "norm_rotary_store_kv": triton_layer.norm_rotary_store_kv_kernel,
    "rotary": triton_layer.rotary_kernel,
    "rms_norm": triton_layer.rms_norm_kernel,
    "gate_and_mul": triton_layer.gate_and_mul_kernel,
    "race": triton_sampling.race_kernel,
}
# What a launch may ask of an attention kernel beside the plain case, each compiled for every kind of page: (kernel,
# head_dim, label, constants, pointers).
VARIANTS: tuple[tuple[str, int, str, dict[str, Any], dict[str, str]], ...] = (
    ("paged_decode", 128, "after a prefix", {"HAS_START": True}, {"kv_start_ptr": "i32"}),
    ("paged_decode", 128, "one split", {"WRITE_LSE": False}, {"out_ptr": "bf16", "lse_ptr": "none"}),
    ("paged_decode", 128, "G7", {"GROUP": 7}, {}),
    ("paged_decode", 256, "window", {"HAS_WINDOW": True}, {}),
    ("paged_decode", 128, "window cap", {"HAS_WINDOW": True, "HAS_CAP": True}, {}),
    ("paged_prefill", 128, "shared prefix", {"IS_PART": True}, {"out_ptr": "fp32", "lse_ptr": "fp32"}),
    ("paged_prefill", 128, "G7", {"GROUP": 7}, {}),
    ("paged_prefill", 128, "window", {"HAS_WINDOW": True}, {}),
    ("paged_prefill", 256, "window", {"HAS_WINDOW": True}, {}),
    ("paged_prefill", 128, "window cap", {"HAS_WINDOW": True, "HAS_CAP": True}, {}),
)
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# What a matrix instruction looks like in the final code, per architecture.
_TENSOR = {
    "sm_80": r"\bHMMA\b",
    "sm_90": r"\bHG?MMA\b",
    "sm_100": r"\b(HMMA|UTC\w*MMA)\b",
    "sm_120": r"\bHMMA\b",
    "gfx942": r"v_mfma_",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel in one configuration for one architecture."""

    kernel: str
    arch: Arch
    label: str
    pointers: dict[str, str]  # argument -> element type
    scalars: dict[str, str]  # argument -> type; those in `divisible` are multiples of 16
    divisible: frozenset[str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    uses_tensor_cores: bool = False
    min_kv_buffers: int = 0


@dataclass(slots=True)
class Row:
    """What the compiler made of a case. `instructions` counts what matters in the final code."""

    kernel: str
    config: str
    arch: str
    ok: bool = False
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    instructions: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pages:
    """A kind of KV cache: what the model computes in (`query`), how a page holds it, KV_KIND, bytes of a number."""

    label: str
    query: str
    pointer: str
    kind: int = 0
    num_bytes: int = 2


def _pages(arch: Arch) -> Iterator[Pages]:
    """The caches of a bfloat16 model that this architecture can hold."""
    yield Pages("bf16", "bf16", "bf16")
    if arch == "sm_80":
        yield Pages("e4m3", "bf16", "u8", 2, 1)
    else:
        yield Pages("e4m3", "bf16", "fp8e4b8" if arch == "gfx942" else "fp8e4nv", 1, 1)
    if arch != "gfx942":
        yield Pages("e5m2", "bf16", "fp8e5", 1, 1)


_FLOAT32 = Pages("fp32", "fp32", "fp32", 0, 4)
_FLOAT16 = Pages("fp16", "fp16", "fp16")


def _attention_case(
    kernel: str,
    arch: Arch,
    head_dim: int,
    pages: Pages,
    label: str = "",
    constants: dict[str, Any] | None = None,
    pointers: dict[str, str] | None = None,
) -> Case:
    """One attention kernel; `label`, `constants` and `pointers` say what differs from the plain case."""
    has_scales = pages.num_bytes == 1
    scale = "fp32" if has_scales else "none"
    is_decode = kernel == "paged_decode"
    asked = constants or {}
    group = asked.get("GROUP", GROUP)
    if is_decode:
        config = decode_config(arch, head_dim, pages.num_bytes, group)
        own: dict[str, Any] = {"HAS_START": False, "WRITE_LSE": True}
        own_pointers = {"out_ptr": "fp32", "lse_ptr": "fp32", "kv_start_ptr": "none"}
    else:
        is_special = bool(asked.keys() & {"IS_PART", "HAS_WINDOW", "HAS_CAP"})
        config = prefill_config(arch, head_dim, pages.num_bytes, group, is_special=is_special)
        own = {"IS_PART": False}
        own_pointers = {"out_ptr": pages.query, "lse_ptr": "none", "starts_ptr": "i32"}
    rows = "" if is_decode else f"M{config.block_m} "
    shape = f"{rows}N{config.block_n} w{config.num_warps} s{config.num_stages}"
    scalars = {"scale_log2": "fp32", "soft_cap": "fp32"}
    scalars |= dict.fromkeys(("window", "num_requests", "q_stride", "table_stride", "num_parts"), "i32")
    return Case(
        kernel,
        arch,
        f"D{head_dim} {pages.label} {shape} {label}".strip(),
        {"q_ptr": pages.query, "k_ptr": pages.pointer, "v_ptr": pages.pointer, "table_ptr": "i32"}
        | {"seq_lens_ptr": "i32", "k_scale_ptr": scale, "v_scale_ptr": scale}
        | own_pointers
        | (pointers or {}),
        scalars,
        frozenset({"q_stride"}),
        _attention_constants(arch, head_dim, pages, config, has_scales) | own | asked,
        config.num_warps,
        config.num_stages,
        uses_tensor_cores=pages.num_bytes < 4 or arch != "gfx942",
        min_kv_buffers=2 if is_decode and arch != "gfx942" and pages.num_bytes < 4 else 0,
    )


def _attention_constants(
    arch: Arch, head_dim: int, pages: Pages, config: AttentionConfig, has_scales: bool
) -> dict[str, Any]:
    return {
        "GROUP": GROUP,
        "BLOCK_M": config.block_m,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_dim(head_dim),
        "PAGE": PAGE,
        "BLOCK_N": config.block_n,
        "HAS_WINDOW": False,
        "HAS_CAP": False,
        "HAS_SCALES": has_scales,
        "KV_KIND": pages.kind,
        "PRECISION": dot_precision(arch, pages.query == "fp32"),
    }


def _attention_cases(arch: Arch) -> Iterator[Case]:
    for head_dim in HEAD_DIMS:
        for pages in (*_pages(arch), _FLOAT32, *((_FLOAT16,) if head_dim == 128 else ())):
            for kernel in ("paged_decode", "paged_prefill"):
                yield _attention_case(kernel, arch, head_dim, pages)


def _variant_cases(arch: Arch) -> Iterator[Case]:
    for kernel, head_dim, label, constants, pointers in VARIANTS:
        for pages in _pages(arch):
            yield _attention_case(kernel, arch, head_dim, pages, label, constants, pointers)


def _layer_cases(arch: Arch) -> Iterator[Case]:
    for pages in _pages(arch):
        scale = "fp32" if pages.num_bytes == 1 else "none"
        yield Case(
            "store_kv",
            arch,
            f"D128 {pages.label}",
            {"key_ptr": "bf16", "value_ptr": "bf16", "k_cache_ptr": pages.pointer, "v_cache_ptr": pages.pointer}
            | {"slots_ptr": "i64", "k_scale_ptr": scale, "v_scale_ptr": scale},
            {"key_stride": "i32", "value_stride": "i32"},
            frozenset({"key_stride", "value_stride"}),
            {"NUM_HEADS": 8, "BLOCK_H": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "PAGE": PAGE}
            | {"HAS_SCALES": pages.num_bytes == 1, "KV_KIND": pages.kind},
        )
    for has_norm in (False, True):
        for pages in _pages(arch):
            scale = "fp32" if pages.num_bytes == 1 else "none"
            weight = "bf16" if has_norm else "none"
            strides = ("q_stride", "key_stride", "value_stride")
            yield Case(
                "norm_rotary_store_kv",
                arch,
                f"D128 {pages.label} norm" if has_norm else f"D128 {pages.label}",
                dict.fromkeys(("q_out_ptr", "q_ptr", "key_ptr", "value_ptr"), "bf16")
                | {
                    "k_cache_ptr": pages.pointer,
                    "v_cache_ptr": pages.pointer,
                    "slots_ptr": "i64",
                    "positions_ptr": "i64",
                }
                | {"cos_sin_ptr": "fp32", "q_weight_ptr": weight, "k_weight_ptr": weight}
                | {"k_scale_ptr": scale, "v_scale_ptr": scale},
                {"eps": "fp32"} | dict.fromkeys(strides, "i32"),
                frozenset(strides),
                {"GROUP": GROUP, "BLOCK_G": GROUP, "HALF": 64, "BLOCK_HALF": 64, "PAGE": PAGE}
                | {"HAS_NORM": has_norm, "HAS_SCALES": pages.num_bytes == 1, "KV_KIND": pages.kind},
                num_warps=1,
            )
    yield Case(
        "merge_attention_states",
        arch,
        "D128 P8",
        {"out_ptr": "bf16", "lse_out_ptr": "none", "parts_ptr": "fp32", "lse_ptr": "fp32"},
        {"num_parts": "i32"},
        frozenset(),
        {"BLOCK_P": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "WRITE_LSE": False},
    )
    yield Case(
        "rotary",
        arch,
        "D128",
        {"x_ptr": "bf16", "out_ptr": "bf16", "positions_ptr": "i64", "cos_sin_ptr": "fp32"},
        {"x_stride": "i32", "out_stride": "i32"},
        frozenset({"x_stride", "out_stride"}),
        {"NUM_HEADS": 32, "BLOCK_H": 32, "HALF": 64, "BLOCK_HALF": 64, "HEAD_DIM": 128},
    )
    for has_residual in (False, True):
        yield Case(
            "rms_norm",
            arch,
            "N4096 residual" if has_residual else "N4096",
            {"x_ptr": "bf16", "residual_ptr": "bf16" if has_residual else "none", "weight_ptr": "bf16"}
            | {"out_ptr": "bf16"},
            {"eps": "fp32", "inner": "i32", "x_stride": "i32"},
            frozenset({"x_stride"}),
            {"N": 4096, "BLOCK": 4096, "HAS_RESIDUAL": has_residual},
            num_warps=8,
        )
    for gelu in (False, True):
        yield Case(
            "gate_and_mul",
            arch,
            "gelu" if gelu else "silu",
            {"x_ptr": "bf16", "out_ptr": "bf16"},
            {"x_stride": "i32", "N": "i32"},
            frozenset({"x_stride", "N"}),
            {"BLOCK": 1024, "GELU": gelu},
        )
    yield Case(
        "race",
        arch,
        f"N{triton_sampling.BLOCK}",
        {"best_ptr": "fp32", "token_ptr": "i64", "scaled_ptr": "fp32", "keys_ptr": "i64"},
        {"row_stride": "i32", "vocab_size": "i32"},
        frozenset({"row_stride", "vocab_size"}),
        {"BLOCK": triton_sampling.BLOCK},
    )


def cases(archs: tuple[Arch, ...] = ARCHS) -> list[Case]:
    """Every row of the table, for every architecture."""
    makers = (_attention_cases, _variant_cases, _layer_cases)
    return [case for arch in archs for make in makers for case in make(arch)]


def _compile(case: Case) -> Any:
    signature: dict[str, str] = {}
    constants = dict(case.constants)
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(FUNCTIONS[case.kernel].arg_names):
        if name in case.constants:
            signature[name] = "constexpr"
        elif case.pointers.get(name) == "none":
            signature[name] = "constexpr"
            constants[name] = None
        elif name in case.pointers:
            signature[name] = f"*{case.pointers[name]}"
            if not FUNCTIONS[case.kernel].params[index].do_not_specialize_on_alignment:
                attrs[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = case.scalars[name]
            if name in case.divisible:
                attrs[(index,)] = [["tt.divisibility", 16]]
    positions = {(FUNCTIONS[case.kernel].arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=FUNCTIONS[case.kernel], signature=signature, constexprs=positions, attrs=attrs)
    if case.arch == "gfx942":
        target = GPUTarget("hip", "gfx942", 64)
    else:
        target = GPUTarget("cuda", int(case.arch.removeprefix("sm_")), 32)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    return triton.compile(source, target=target, options=options)


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def _read_cuda(compiled: Any, row: Row) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", _tool("cuobjdump", "-res-usage", str(path))))
        sass = _tool("nvdisasm", "-c", str(path))
    row.registers = int(usage["REG"])
    row.spill_bytes = int(usage["STACK"]) + int(usage["LOCAL"])
    row.shared_bytes = int(compiled.metadata.shared)
    row.instructions["loads_128"] = len(re.findall(r"\b(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128|UBLKCP|UTMALDG", sass))
    return sass


def _read_hip(compiled: Any, row: Row) -> str:
    assembly = str(compiled.asm["amdgcn"])
    notes = dict(re.findall(r"\.(vgpr_count|agpr_count|sgpr_spill_count|vgpr_spill_count):\s*(\d+)", assembly))
    row.registers = int(notes["vgpr_count"])
    row.spill_bytes = 4 * int(notes["vgpr_spill_count"])  # scalar registers spill into vector lanes, not to memory
    row.shared_bytes = int(compiled.metadata.shared)
    row.instructions["loads_128"] = len(re.findall(r"(?:global|buffer)_load_dwordx4", assembly))
    return assembly


def _kv_buffers(ttgir: str, block_n: int, block_d: int) -> int:
    """How many buffers the pipeliner gave a tile of K or V, from the shapes of its allocations."""
    shapes = re.findall(rf"memdesc<(\d+)x(?:{block_n}x{block_d}|{block_d}x{block_n})x", ttgir)
    return max(map(int, shapes), default=1)


def compile_case(case: Case) -> Row:
    """Compile one case and hold it to what the table promises; a failure is a row with `problems`, not an error."""
    row = Row(case.kernel, case.label, case.arch)
    try:
        compiled = _compile(case)
        code = (_read_hip if case.arch == "gfx942" else _read_cuda)(compiled, row)
    except Exception as error:  # whatever the compiler raises is what this report is for
        row.problems.append(
            f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200] if str(error) else ''}"
        )
        return row
    row.instructions["tensor"] = len(re.findall(_TENSOR[case.arch], code))
    if case.uses_tensor_cores and not row.instructions["tensor"]:
        row.problems.append("no tensor instructions")
    if case.min_kv_buffers:
        buffers = _kv_buffers(compiled.asm["ttgir"], case.constants["BLOCK_N"], case.constants["BLOCK_D"])
        row.instructions["kv_buffers"] = buffers
        if buffers < case.min_kv_buffers:
            row.problems.append(f"{buffers} K/V buffers")
    if row.spill_bytes:
        row.problems.append(f"spills {row.spill_bytes} bytes")
    if row.shared_bytes > (SMALLEST_SM8X_BYTES if case.arch == "sm_80" else SHARED_LIMIT_BYTES[case.arch]):
        row.problems.append(f"{row.shared_bytes} bytes of shared memory")
    if not row.instructions["loads_128"] and (case.uses_tensor_cores or case.arch != "gfx942"):
        row.problems.append("no 128-bit loads")
    row.ok = not row.problems
    return row
