"""The steps that are run once before the KV cache is sized: the largest one, whose memory is measured, and small ones.

The small ones are for the kernels: a compiled kernel is chosen by batch size, and its first use compiles it. Whatever
is not compiled here would be in the middle of serving. Knows no memory rule (see `memory_budget`). Floor 2.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

import torch

from kvctl.core.config import SchedulerConfig
from kvctl.core.sampling_params import SamplingParams
from kvctl.engine.config import CpuKernels
from kvctl.engine.kv_cache import KVCache, allocate_kv_cache
from kvctl.engine.models.decoder import Decoder
from kvctl.engine.ops import AttentionMetadata, KVScales
from kvctl.engine.sampler import Sampler, SamplingBatch, select_sampling
from kvctl.sizing.kv_plan import KVLayout


@torch.inference_mode()
def run_profile_steps(
    decoder: Decoder,
    device: torch.device,
    layout: KVLayout,
    limits: SchedulerConfig,
    kv_dtype: torch.dtype,
    kv_scales: Mapping[int, KVScales],
    cpu_kernels: CpuKernels = "auto",
) -> None:
    """Run decode steps of 1, 2, 4, ... max_num_seqs requests, with and without a prefix that they share, then a step of
    max_num_batched_tokens tokens and max_num_seqs samples.

    The cache is the null block alone, so that nothing but activations and logits is taken.
    """
    cache = allocate_kv_cache(
        layout.groups,
        num_blocks=1,
        block_size=layout.block_size,
        num_kv_heads=decoder.config.num_kv_heads,
        head_dim=decoder.config.head_dim,
        dtype=kv_dtype,
        device=device,
        scales=kv_scales,
    )
    num_tokens = limits.max_num_batched_tokens
    num_rows = min(limits.max_num_seqs, num_tokens)
    sampler = Sampler(decoder.config.vocab_size, device, 0, select_sampling(device, cpu_kernels))
    for size in (*takewhile(lambda size: size < num_rows, (1 << i for i in range(16))), num_rows):
        _step(decoder, cache, layout, [1] * size, size, sampler, device)
        if size > 1:
            _step(decoder, cache, layout, [1] * size, size, sampler, device, is_cascade=True)
    lengths = [limits.max_model_len] * (num_tokens // limits.max_model_len)
    if num_tokens % limits.max_model_len:
        lengths.append(num_tokens % limits.max_model_len)
    _step(decoder, cache, layout, lengths, num_rows, sampler, device)


def _step(
    decoder: Decoder,
    cache: KVCache,
    layout: KVLayout,
    lengths: list[int],
    num_rows: int,
    sampler: Sampler,
    device: torch.device,
    *,
    is_cascade: bool = False,
) -> None:
    """One step of prompts of these lengths; after `num_rows` of its tokens it samples in each way."""
    width = -(-max(lengths) // layout.block_size)
    meta = AttentionMetadata.from_lists([[0] * width] * len(lengths), lengths, lengths, layout.block_size, device)
    if is_cascade:  # of no tokens: layers with a window leave it aside, as they do in serving
        meta = replace(meta, shared_prefix=torch.tensor([0, len(lengths), 0], dtype=torch.int32, device=device))
    added, residual = decoder.forward(
        torch.zeros(sum(lengths), dtype=torch.int64, device=device),
        torch.cat([torch.arange(length, device=device) for length in lengths]),
        cache.layers,
        [meta] * len(layout.groups),
    )
    logits = decoder.logits(added[:num_rows], residual[:num_rows])
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
    ):
        rows = [sampler.new_row(params, [0], 1, ()) for _ in range(num_rows)]
        sampler.sample(logits, SamplingBatch(rows))
