"""The tensors of the KV cache: which layers share what, how many bytes, and that none is spent before it is used."""

import subprocess
import sys

import pytest
import torch

from kvctl.core.kv_cache_groups import group_layers
from kvctl.engine.json_file import read_json_object
from kvctl.engine.kv_cache import allocate_kv_cache
from kvctl.model.dtypes import kv_format
from kvctl.model.kv_cache_spec import KVOptions, kv_cache_specs
from kvctl.model.model_shape import ModelShape
from tests.support import engine_runs, tiny_models

CPU = torch.device("cpu")
SHAPE = {"block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32, "device": CPU}


def test_a_uniform_model_has_a_pair_of_tensors_per_layer():
    cache = allocate_kv_cache(group_layers([None] * 3), num_blocks=5, **SHAPE)
    assert len(cache.layers) == 3
    assert {layer.group for layer in cache.layers} == {0}
    assert len({layer.k_cache.data_ptr() for layer in cache.layers}) == 3
    for layer in cache.layers:
        assert layer.k_cache.shape == layer.v_cache.shape == (5, 2, 4, 8)
        assert layer.k_cache.is_contiguous()
    assert cache.total_bytes == 3 * 2 * 5 * 2 * 4 * 8 * 4


def test_groups_of_a_hybrid_model_share_tensors_and_differ_in_blocks():
    windows = [4, 4, 4, 4, 4, None] * 2  # 10 sliding, 2 full: five sliding groups of two layers, one full group
    groups = group_layers(windows)
    cache = allocate_kv_cache(groups, num_blocks=5, **SHAPE)
    assert cache.total_bytes == 2 * 2 * 5 * 2 * 4 * 8 * 4
    for group_index, group in enumerate(groups):
        layers = [cache.layers[index] for index in group.layer_indices]
        assert {layer.group for layer in layers} == {group_index}
        assert len({layer.k_cache.data_ptr() for layer in layers}) == len(layers)
    assert len({layer.k_cache.data_ptr() for layer in cache.layers}) == 2


COST = """
import resource, torch
from pathlib import Path
from kvctl.core.kv_cache_groups import group_layers
from kvctl.engine.kv_cache import allocate_kv_cache

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

before = resident_bytes()
cache = allocate_kv_cache(group_layers([None] * 4), num_blocks=4096, block_size=16, num_kv_heads=8, head_dim=128,
                          dtype=torch.bfloat16, device=torch.device("cpu"))
grown = resident_bytes() - before
print(cache.total_bytes, grown, int(cache.layers[3].v_cache[4095].count_nonzero()))
"""


def test_the_cache_reads_as_zeros_and_takes_no_memory_before_it_is_written():
    done = subprocess.run([sys.executable, "-c", COST], capture_output=True, text=True, check=True)
    total, grown, nonzero = map(int, done.stdout.split())
    assert total == 1 << 30 and grown < 64 << 20 and nonzero == 0


@pytest.mark.parametrize("num_blocks", [1 << 40, 1 << 62])
def test_more_than_the_system_gives_is_a_memory_error(num_blocks):
    """The kernel's own refusal, as under a limit on address space or strict overcommit."""
    with pytest.raises(MemoryError, match="bytes"):
        allocate_kv_cache(group_layers([None]), num_blocks=num_blocks, **SHAPE)


@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_bytes_allocated_are_those_that_size_predicts_from_the_config(tiny, tiny_folder):
    _, folder = tiny_folder(tiny)
    engine = engine_runs.start(folder, num_blocks=200)
    specs = kv_cache_specs(
        ModelShape.from_config(read_json_object(folder / "config.json")), KVOptions(kv_format("auto", "float32"))
    )
    layers_in_a_block = max(len(group.layer_indices) for group in engine.core.scheduler.kv_cache_manager.groups)
    per_layer = {spec.bytes_per_token for spec in specs}
    assert len(specs) == engine.core.runner._model.config.num_layers
    assert engine.info.kv_cache_bytes == 200 * 16 * layers_in_a_block * per_layer.pop() and not per_layer
