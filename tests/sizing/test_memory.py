"""The memory of one GPU: what is left for KV against lines that servers printed, and what moves which way."""

from typing import Any

import pytest

from kvctl.model.hardware import find_hardware
from kvctl.model.weight_size import Parallelism
from kvctl.sizing.memory import MemoryBudget
from kvctl.sizing.request import SizeRequest, size_up
from kvctl.sizing.sized_model import load_model
from kvctl.units import GIB

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"


def budget(name: str, gpu: str, engine: str, **choices: Any) -> MemoryBudget:
    answer = size_up(SizeRequest(load_model(name), engine, hardware=find_hardware(gpu), **choices))
    assert answer.budget is not None
    return answer.budget


@pytest.mark.parametrize(
    ("gpu", "version", "tensor", "length", "printed_gib"),
    [
        # issue 10517: 0.35 GiB beside PyTorch; lengths over 32,768 go in chunks
        ("rtx-3090", "0.6.4", 1, 20_000, 3.81),
        ("rtx-3090", "0.6.4", 1, 29_000, 2.89),
        ("rtx-3090", "0.6.4", 1, 35_000, 5.82),
        # pull request 10511: 1.79 and 3.58 GiB beside PyTorch
        ("h100-sxm", "0.6.5", 1, 8192, 53.29),
        ("h100-sxm", "0.6.5", 2, 8192, 58.97),
    ],
)
def test_what_early_versions_printed_is_in_the_range(
    gpu: str, version: str, tensor: int, length: int, printed_gib: float
) -> None:
    kv = budget(LLAMA, gpu, f"vllm@{version}", parallel=Parallelism(tensor), max_model_len=length, utilization=0.9).kv
    assert kv.low / GIB <= printed_gib <= kv.high / GIB
    assert kv.value / GIB == pytest.approx(printed_gib, rel=0.08)


def test_longer_steps_and_more_rows_leave_less_for_kv() -> None:
    base = budget(LLAMA, "l40s", "vllm@0.24").kv.value
    assert budget(LLAMA, "l40s", "vllm@0.24", max_num_batched_tokens=65_536).kv.value < base
    assert budget(LLAMA, "l40s", "vllm@0.24", max_num_seqs=4096).kv.value < base


def test_graphs_are_part_of_the_budget_since_0_21() -> None:
    for version, part in (("0.20", 0), ("0.21", 1)):
        with_graphs, eager = (
            budget(LLAMA, "l40s", f"vllm@{version}", utilization=0.9, enforce_eager=e) for e in (False, True)
        )
        assert eager.kv.value - with_graphs.kv.value == part * with_graphs.graphs.value
