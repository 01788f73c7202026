"""KVCacheSpec: the bytes that one layer keeps on one GPU, per token or per request. The heart of `size`.

Knows layer shapes, the KV number format and tensor parallelism; no blocks, no engine versions (sizing/ has
those). Key/value heads that are fewer than the ranks are replicated; a latent (MLA) is kept whole by every rank.
Floor 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvctl.errors import ConfigError
from kvctl.model.dtypes import KVFormat, element_bytes
from kvctl.model.layer_shape import LayerKind, LayerShape
from kvctl.model.model_shape import ModelShape

TOKEN_KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.MLA, LayerKind.CROSS)
DS_MLA_ENTRY_BYTES = 656  # 512 FP8 + 4 float32 scales + 64 BF16 RoPE. Source: vLLM's fp8_ds_mla (FlashMLA sparse)
DS_V4_ENTRY_BYTES = 584  # 448 FP8 + 64 BF16 RoPE + 8 scale bytes. Source: vLLM's models/deepseek_v4


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps on one GPU: `bytes_per_token` of tokens in reach, or `state_bytes` per request."""

    layer_index: int
    kind: LayerKind
    bytes_per_token: int = 0
    window_tokens: int | None = None
    source_tokens: int | None = None
    state_bytes: int | None = 0  # None: not known
    compress_ratio: int = 0
    indexer_bytes: int = 0  # included in bytes_per_token
    mixer: str = ""  # of a recurrent layer: 'mamba2', 'gdn', ...


@dataclass(frozen=True, slots=True)
class KVOptions:
    """What decides a spec besides the model: the number format, the ranks, and how a latent is stored.

    `latent_bytes` replaces the size of one MLA entry: an engine version may pad it or store it as whole heads.
    """

    kv_format: KVFormat
    tensor_parallel: int = 1
    model_dtype: str = "bfloat16"
    latent_bytes: int | None = None
    state_dtype: str | None = None  # overrides the recurrent (ssm) part's format


def _token_bytes(layer: LayerShape, options: KVOptions) -> int:
    if layer.kind is LayerKind.MLA:
        fmt = options.kv_format
        entry = options.latent_bytes or fmt.vector_bytes(layer.key_dim)
        if layer.is_sparse and options.latent_bytes is None and fmt.bits == 8:
            entry = DS_MLA_ENTRY_BYTES
        return entry + layer.indexer_bytes
    heads = max(1, layer.num_kv_heads // options.tensor_parallel)
    fmt = options.kv_format
    return heads * (fmt.vector_bytes(layer.key_dim) + fmt.vector_bytes(layer.value_dim)) + layer.indexer_bytes


def _state_bytes(layer: LayerShape, options: KVOptions) -> int | None:
    if layer.state is None:
        return None
    total = 0
    for part in layer.state:
        dtype = part.dtype or options.model_dtype
        if options.state_dtype is not None and part.name == "ssm":
            dtype = options.state_dtype
        total += part.elements_per_rank(options.tensor_parallel) * element_bytes(dtype)
    return total


def kv_cache_specs(shape: ModelShape, options: KVOptions) -> tuple[KVCacheSpec, ...]:
    """One spec for every layer that keeps something, in layer order.

    Raises:
        ConfigError: the ranks do not divide the heads.
    """
    tp = options.tensor_parallel
    if shape.num_attention_heads and shape.num_attention_heads % tp:
        raise ConfigError(
            f"--tensor-parallel-size {tp} does not divide the model's {shape.num_attention_heads} attention heads",
            hint=f"Choose one of {', '.join(map(str, _divisors(shape.num_attention_heads)))}.",
        )
    specs = []
    for layer in shape.layers:
        if layer.kind in (LayerKind.NONE, LayerKind.SHARED):
            continue
        if layer.kind in TOKEN_KINDS and layer.num_kv_heads > 1 and layer.num_kv_heads % tp and tp % layer.num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size {tp} does not fit {layer.num_kv_heads} key/value heads",
                hint="It must divide them or be a multiple of them.",
            )
        if layer.kind is LayerKind.STATE:
            state_bytes = _state_bytes(layer, options)
            specs.append(KVCacheSpec(layer.index, layer.kind, state_bytes=state_bytes, mixer=layer.label))
        elif layer.compress_ratio or (
            layer.kind is LayerKind.SLIDING and not layer.value_dim and layer.num_kv_heads == 1
        ):
            entry = DS_V4_ENTRY_BYTES if options.kv_format.bits == 8 else options.kv_format.vector_bytes(layer.key_dim)
            specs.append(
                KVCacheSpec(
                    layer.index,
                    layer.kind,
                    entry + layer.indexer_bytes,
                    layer.window_tokens,
                    compress_ratio=layer.compress_ratio,
                    indexer_bytes=layer.indexer_bytes,
                )
            )
        else:
            specs.append(
                KVCacheSpec(
                    layer.index,
                    layer.kind,
                    _token_bytes(layer, options),
                    layer.window_tokens,
                    layer.source_tokens,
                    indexer_bytes=layer.indexer_bytes,
                )
            )
    return tuple(specs)


def _divisors(number: int) -> list[int]:
    return [d for d in (1, 2, 4, 8, 16, 32, 64) if number % d == 0]


def marginal_bytes_per_token(specs: Sequence[KVCacheSpec], longest_tokens: int | None = None) -> int:
    """The ideal cost of one more token of a long context: layers that keep every token.

    A window of `longest_tokens` or more never binds and counts as full; states do not grow; a compressed layer pays
    one entry per `compress_ratio` tokens (rounded up). Where every layer has a binding window, the cost inside it.
    """
    limit = longest_tokens or 0
    whole = [
        s
        for s in specs
        if s.kind in (LayerKind.FULL, LayerKind.MLA) or ((s.window_tokens or 0) >= limit > 0 and not s.compress_ratio)
    ]
    compressed = [s for s in specs if s.kind is LayerKind.COMPRESSED]
    if not whole and not compressed:
        return sum(s.bytes_per_token for s in specs if s.window_tokens is not None)
    parts = sum(s.bytes_per_token * 128 // s.compress_ratio for s in compressed)  # in 128ths
    return sum(s.bytes_per_token for s in whole) + -(-parts // 128)


def all_layers_bytes_per_token(specs: Sequence[KVCacheSpec]) -> int:
    """Bytes per token when every attending layer keeps every token (windows ignored)."""
    return sum(s.bytes_per_token for s in specs if s.kind is not LayerKind.STATE)


def request_bytes(specs: Sequence[KVCacheSpec], num_tokens: int) -> int | None:
    """Ideal bytes of one request of `num_tokens`: windows capped, states and encoder tokens once. None: unknown."""
    total = 0
    for spec in specs:
        if spec.kind is LayerKind.STATE:
            if spec.state_bytes is None:
                return None
            total += spec.state_bytes
        elif spec.kind is LayerKind.CROSS:
            total += spec.bytes_per_token * (spec.source_tokens or 0)
        elif spec.kind is LayerKind.COMPRESSED:
            window = min(num_tokens, spec.window_tokens or 0)
            total += (spec.bytes_per_token - spec.indexer_bytes) * window
            total += spec.bytes_per_token * (num_tokens // spec.compress_ratio)
        else:
            reach = num_tokens if spec.window_tokens is None else min(num_tokens, spec.window_tokens)
            total += spec.bytes_per_token * reach
    return total


def state_bytes_per_request(specs: Sequence[KVCacheSpec]) -> int | None:
    """Fixed recurrent bytes of one request on one GPU; None when the config leaves a size out."""
    total = 0
    for spec in specs:
        if spec.kind is LayerKind.STATE:
            if spec.state_bytes is None:
                return None
            total += spec.state_bytes
    return total
