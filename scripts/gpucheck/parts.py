"""All parts by name."""

from collections.abc import Callable, Iterator
from typing import Any

from gpucheck.bench import Bench
from gpucheck.engines import engine_eager, engine_fp8, engine_graphs, tiny_engine
from gpucheck.kernels import attention, layers
from gpucheck.layer_speed import layer_speed
from gpucheck.memory import memory_checker
from gpucheck.speed import cascade, ceilings, decode, environment, prefill, splits

PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    part.__name__: part
    for part in (
        environment, ceilings, attention, layers, tiny_engine, decode, prefill, cascade, splits, layer_speed,
        engine_graphs, engine_eager, engine_fp8, memory_checker,
    )
}  # fmt: skip
