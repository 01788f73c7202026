"""All layers in one native call give the bits of the operations one by one, for every family."""

import json

import pytest
import torch

from kvctl.core.kv_cache_groups import group_layers
from kvctl.engine.kv_cache import allocate_kv_cache
from kvctl.engine.layers.linear import TorchLinears, select_linears
from kvctl.engine.models import layer_stack
from kvctl.engine.models.decoder import build_decoder
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.ops import TorchOps, select_ops
from kvctl.engine.weights import DummyWeights
from kvctl_kernels.metadata import AttentionMetadata
from tests.support import tiny_models

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 40
QUERY_LENS = [1, 1, 1, 30, 2, 70]
SEQ_LENS = [1, 40, 90, 30, 65, 81]


def decoder_config(tiny, head_dim):
    raw = tiny.make_config()
    raw.head_dim = head_dim
    raw.architectures = [tiny_models.architecture(raw)]
    return parse_decoder_config(json.loads(raw.to_json_string()))


class LivelyWeights:
    """Random weights large enough that nothing vanishes in rounding; norms and biases too."""

    def __init__(self, dtype):
        self._dtype = dtype

    def load(self, packed):
        generator = torch.Generator().manual_seed(len(packed.key) + sum(map(ord, packed.key)))
        drawn = torch.randn(packed.shape, generator=generator)
        scaled = 1 + 0.2 * drawn if packed.is_norm else drawn / packed.shape[-1] ** 0.5
        return scaled if packed.is_norm else scaled.to(self._dtype)


def run(config, dtype, threads, kv_dtype=None, cpu_kernels="native"):
    """One mixed step over caches with something in them; returns the result, the caches and the decoder."""
    decoder = build_decoder(
        config,
        LivelyWeights(dtype),
        select_ops(CPU, dtype, cpu_kernels, threads),
        select_linears(CPU, dtype, cpu_kernels, threads),
        dtype=dtype,
        device=CPU,
        num_positions=200,
    )
    groups = group_layers(config.windows)
    cache = allocate_kv_cache(
        groups,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype or dtype,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(1)
    for kv in cache.layers:
        for pages in (kv.k_cache, kv.v_cache):
            pages.copy_(torch.randn(pages.shape, generator=generator).to(pages.dtype))
    metadata = []
    for group in range(len(groups)):
        order = iter((torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist())
        tables = [[next(order) for _ in range(-(-length // BLOCK_SIZE))] for length in SEQ_LENS]
        metadata.append(AttentionMetadata.from_lists(tables, QUERY_LENS, SEQ_LENS, BLOCK_SIZE))
        assert metadata[group].num_decode_requests == 3
    positions = torch.cat(
        [torch.arange(length - count, length) for count, length in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    )
    ids = torch.randint(0, config.vocab_size, (len(positions),), generator=generator)
    with torch.inference_mode():
        before = [(kv.k_cache.clone(), kv.v_cache.clone()) for kv in cache.layers]
        result = decoder.forward(ids, positions, cache.layers, metadata)
        for wanted in ([0, 2, 4], [0, 1, 2, 3, 4], [3], []):  # requests whose last token's result is asked for
            for kv, (k_cache, v_cache) in zip(cache.layers, before, strict=True):  # the groups' blocks overlap here
                kv.k_cache.copy_(k_cache)
                kv.v_cache.copy_(v_cache)
            rows = torch.tensor(QUERY_LENS).cumsum(0)[wanted] - 1
            some = decoder.forward(ids, positions, cache.layers, metadata, rows)
            assert all(torch.equal(part, whole[rows]) for part, whole in zip(some, result, strict=True)), wanted
        again = decoder.forward(ids[:1], positions[:1], cache.layers, [shortened(meta) for meta in metadata])
    return (*result, *again), cache, decoder


def shortened(meta):
    """The first request alone."""
    return AttentionMetadata.from_lists([meta.block_tables[0].tolist()], [1], [1], BLOCK_SIZE)


@pytest.fixture
def one_by_one(monkeypatch):
    """Make decoders that call one operation after another."""

    def choose():
        monkeypatch.setattr("kvctl.engine.models.decoder.select_layer_stack", layer_stack.PerOperationStack)

    return choose


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_one_call_gives_the_bits_of_the_single_operations(tiny, dtype, threads, one_by_one):
    config = decoder_config(tiny, 16)
    fused, fused_cache, decoder = run(config, dtype, threads)
    assert isinstance(decoder._layers, layer_stack.NativeLayerStack)
    assert decoder._layers._native is not None
    one_by_one()
    single, single_cache, decoder = run(config, dtype, threads)
    assert isinstance(decoder._layers, layer_stack.PerOperationStack)
    for ours, theirs in zip(fused, single, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all() and ours.float().std() > 0.01
    for ours, theirs in zip(fused_cache.layers, single_cache.layers, strict=True):
        assert torch.equal(ours.k_cache, theirs.k_cache) and torch.equal(ours.v_cache, theirs.v_cache)


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.QWEN3, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_one_call_agrees_with_torch(tiny):
    config = decoder_config(tiny, 32)
    ours, _, _ = run(config, torch.float32, 2)
    theirs, _, _ = run(config, torch.float32, 2, cpu_kernels="torch")
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_head_sizes_the_kernels_do_not_take_run_one_operation_at_a_time():
    _, _, decoder = run(decoder_config(tiny_models.LLAMA, 8), torch.float32, 1)
    assert isinstance(decoder._layers, layer_stack.PerOperationStack)


def test_pages_of_another_type_run_one_operation_at_a_time(one_by_one):
    config = decoder_config(tiny_models.LLAMA, 16)
    ours, _, decoder = run(config, torch.bfloat16, 1, kv_dtype=torch.float8_e4m3fn)
    assert isinstance(decoder._layers, layer_stack.NativeLayerStack)
    assert decoder._layers._native is None
    one_by_one()
    theirs, _, _ = run(config, torch.bfloat16, 1, kv_dtype=torch.float8_e4m3fn)
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_a_bfloat16_model_as_it_is_loaded_runs_in_one_call(tiny):
    # Gemma too, whose norms are 1 + w: those of every model are held in float32
    config = decoder_config(tiny, 16)
    decoder = build_decoder(
        config,
        DummyWeights(config, torch.bfloat16, CPU, 1),
        select_ops(CPU, torch.bfloat16, "native", 1),
        select_linears(CPU, torch.bfloat16, "native", 1),
        dtype=torch.bfloat16,
        device=CPU,
        num_positions=8,
    )
    assert isinstance(decoder._layers, layer_stack.NativeLayerStack)


def test_torch_kernels_run_one_operation_at_a_time():
    config = decoder_config(tiny_models.LLAMA, 16)
    decoder = build_decoder(
        config,
        LivelyWeights(torch.float32),
        TorchOps(),
        TorchLinears(),
        dtype=torch.float32,
        device=CPU,
        num_positions=8,
    )
    assert isinstance(decoder._layers, layer_stack.PerOperationStack)
