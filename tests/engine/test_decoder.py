"""The decoder on a device that has no data: every read back to the host, or a stray CPU tensor, is an error there."""

import json

import pytest
import torch

from kvctl.core.kv_cache_groups import group_layers
from kvctl.engine.kv_cache import allocate_kv_cache
from kvctl.engine.layers.linear import TorchLinears
from kvctl.engine.models.decoder import build_decoder
from kvctl.engine.models.registry import parse_decoder_config
from kvctl.engine.ops import TorchOps
from kvctl_kernels.metadata import AttentionMetadata
from tests.support import tiny_models

META = torch.device("meta")


class EmptyWeights:
    """Tensors without data."""

    def load(self, packed):
        return torch.empty(packed.shape, dtype=torch.bfloat16, device=META)


@pytest.mark.parametrize("tiny", [tiny_models.LLAMA, tiny_models.QWEN3, tiny_models.GEMMA3], ids=lambda tiny: tiny.name)
def test_a_step_stays_on_its_device_and_never_waits_for_it(tiny):
    raw = tiny.make_config()
    raw.architectures = [tiny_models.architecture(raw)]
    config = parse_decoder_config(json.loads(raw.to_json_string()))
    decoder = build_decoder(
        config, EmptyWeights(), TorchOps(), TorchLinears(), dtype=torch.bfloat16, device=META, num_positions=100
    )
    groups = group_layers(config.windows)
    cache = allocate_kv_cache(
        groups,
        num_blocks=9,
        block_size=4,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.bfloat16,
        device=META,
    )
    meta = AttentionMetadata.from_lists([[1, 2], [3, 4], [5, 6]], [1, 1, 5], [7, 2, 6], 4, META)
    ids = torch.empty(7, dtype=torch.int64, device=META)
    with torch.inference_mode():
        added, residual = decoder.forward(ids, ids, cache.layers, [meta] * len(groups))
        logits = decoder.logits(added[:3], residual[:3])
    assert added.shape == residual.shape == (7, config.hidden_size)
    assert logits.shape == (3, config.vocab_size)
    assert logits.dtype == torch.bfloat16 and logits.device == META
