"""ModelShape: what a config.json says about a model's layers, in plain numbers; and what it cannot tell.

Knows the fields that give a layer its size (heads, head dims, latents, windows); not how any engine allocates
them. Invariant: every layer index below `num_layers` has at least one LayerShape. Floor 0.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvctl.errors import ModelBroken
from kvctl.model import state_layers
from kvctl.model.config_view import ConfigView
from kvctl.model.layer_patterns import layer_kinds, resolve_family
from kvctl.model.layer_shape import LayerKind, LayerShape, StatePart

INDEXER_BYTES_PER_TOKEN_BASE = 4  # one float32 scale per 128 FP8 elements of an indexer key
_STATES = {
    "mamba1": state_layers.mamba1,
    "mamba2": state_layers.mamba2,
    "gdn": state_layers.gated_delta_net,
    "kda": state_layers.kimi_delta_attention,
    "lightning": state_layers.lightning_attention,
    "conv": state_layers.short_convolution,
    "lru": state_layers.real_gated_lru,
}
_VIEWED_AS_IMAGE_TOKENS = 4  # tiles of one image in Llama 3.2 Vision


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The layers of one model and the few sizes that capacity and speed need."""

    architecture: str
    family: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    dtype: str
    max_model_len: int | None
    num_draft_layers: int
    layers: tuple[LayerShape, ...]
    view: ConfigView
    notes: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Read the parsed config.json of a model.

        Raises:
            ModelBroken: fields are missing, impossible, or contradict each other.
            ModelNotSupported: the architecture or one of its layer kinds is not known here ("cannot tell").
        """
        view = ConfigView.of(config)
        if not view.fields or not any(view.get(n) is not None for n in ("num_hidden_layers", "num_attention_heads")):
            listed = view.fields.get("layers_block_type") or view.fields.get("hybrid_override_pattern")
            if not listed:
                raise ModelBroken("this is not the config.json of a language model", hint="It names no layers.")
        family = resolve_family(view)
        kinds = layer_kinds(view, family)
        layers = tuple(shape for index, kind in enumerate(kinds) for shape in _layer(view, family, index, kind))
        return cls(
            architecture=view.architecture,
            family=family or "plain",
            num_layers=len(kinds),
            hidden_size=view.optional_int("hidden_size") or 0,
            num_attention_heads=view.num_heads if view.get("num_attention_heads") is not None else 0,
            vocab_size=view.optional_int("vocab_size") or 0,
            dtype=view.dtype,
            max_model_len=view.max_model_len,
            num_draft_layers=view.count("num_nextn_predict_layers"),
            layers=_share(view, family, layers),
            view=view,
            notes=_notes(view, family),
        )

    @property
    def kind_counts(self) -> dict[str, int]:
        """How many layers of each kind, in the order of their first appearance."""
        return dict(Counter(layer.name for layer in self.layers))

    @property
    def has_unknown_state(self) -> bool:
        """Whether a recurrent layer's state is not given: bytes per token hold, capacity cannot be told."""
        return any(x.kind is LayerKind.STATE and x.state is None for x in self.layers)

    @property
    def attention(self) -> str:
        """MHA, GQA, MQA or MLA, with what stands beside it, for people."""
        names = self.kind_counts
        attending = [x for x in self.layers if x.num_kv_heads and x.kind not in (LayerKind.CROSS, LayerKind.SHARED)]
        parts = []
        if any(x.kind in (LayerKind.MLA, LayerKind.COMPRESSED) for x in attending):
            parts.append("MLA" if not any(x.indexer_bytes for x in attending) else "MLA with sparse index (DSA)")
        plain = [x for x in attending if x.kind not in (LayerKind.MLA, LayerKind.COMPRESSED)]
        if plain:
            heads = plain[0].num_kv_heads
            parts.append("MQA" if heads == 1 else "MHA" if heads == self.num_attention_heads else "GQA")
        extra = [f"{count} {name}" for name, count in names.items() if name not in ("full", "mla", "none")]
        return " + ".join(parts or ["no attention"]) + (f" ({', '.join(extra)})" if extra else "")


def _layer(view: ConfigView, family: str, index: int, kind: str) -> list[LayerShape]:
    shapes = []
    for part in kind.split("+"):
        name, _, argument = part.partition(":")
        if name in _STATES:
            shapes.append(LayerShape(index, LayerKind.STATE, state=_state(view, name), label=name))
        else:
            shapes.append(_BUILDERS[name](view, family, index, argument))
    return shapes


def _state(view: ConfigView, name: str) -> tuple[StatePart, ...] | None:
    """The state's tensors; None when a shortened config leaves their sizes out, which costs only the state."""
    try:
        return _STATES[name](view)
    except ModelBroken:
        if view.fields.get("_incomplete"):
            return None
        raise


def _none(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
    return LayerShape(index, LayerKind.NONE)


def _attention(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
    """Full attention: heads, key and value dims; families where they differ by layer are looked up in a table."""
    heads, key_dim, value_dim = _DIMS.get(family, _uniform_dims)(view, index, "full")
    return LayerShape(
        index, LayerKind.FULL, heads, key_dim, value_dim, indexer_bytes=_block_index_bytes(view, family, index)
    )


def _windowed(kind: LayerKind, field: str) -> Any:
    def build(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
        window = view.optional_int(field) or view.optional_int("sliding_window_size")
        if family == "gemma2" and window is None:
            window = 4096  # the class default of every Gemma 2; its shortened configs leave it out
        if family == "recurrent_gemma":
            window = window or view.optional_int("attention_window_size") or 2048
        if window is None:
            raise ModelBroken(f"config.json has {kind.value} layers but no {field}", hint="Give the full config.json.")
        heads, key_dim, value_dim = _DIMS.get(family, _uniform_dims)(view, index, "window")
        return LayerShape(index, kind, heads, key_dim, value_dim, window_tokens=window)

    return build


def _latent(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
    """MLA: the compressed latent and the shared RoPE key; DSA adds its indexer's FP8 key and scale.

    Source: DeepSeek-V2 (arXiv 2405.04434) sec. 2.1; DeepSeek-V3.2 (index_head_dim, one scale per 128 elements).
    """
    latent = view.required_int("kv_lora_rank") + view.count("qk_rope_head_dim")
    index_dim = view.optional_int("index_head_dim") if view.get("index_topk") else None
    index_bytes = 0 if index_dim is None else index_dim + -(-index_dim // 128) * INDEXER_BYTES_PER_TOKEN_BASE
    if index_bytes and not _has_own_indexer(view, index):
        return LayerShape(index, LayerKind.MLA, 1, latent, 0, label="dsa shared")
    return LayerShape(
        index, LayerKind.MLA, 1, latent, 0, indexer_bytes=index_bytes, label="dsa" if index_bytes else "mla"
    )


def _has_own_indexer(view: ConfigView, index: int) -> bool:
    """Whether a DSA layer picks its tokens itself; GLM-5.2 lets most layers use the choice of an earlier one.

    Checked against 54,728 bytes per token of GLM-5.2 with its draft layer: 79 x 656 + 22 x 132.
    """
    listed = view.strings("indexer_types")
    return listed is None or index >= len(listed) or listed[index] != "shared"


def _cross(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
    heads, key_dim, value_dim = _DIMS.get(family, _uniform_dims)(view, index, "cross")
    return LayerShape(index, LayerKind.CROSS, heads, key_dim, value_dim, source_tokens=_source_tokens(view, family))


def _compressed(view: ConfigView, family: str, index: int, argument: str) -> LayerShape:
    """DeepSeek V4: a window of whole entries, and one entry per `ratio` tokens (0: the window only).

    Source: DeepSeek-V4 config.json (compress_ratios) and transformers' DeepseekV4Config.
    """
    ratio = int(argument)
    index_dim = view.count("index_head_dim") if ratio == 4 else 0
    return LayerShape(
        index,
        LayerKind.COMPRESSED if ratio else LayerKind.SLIDING,
        1,
        view.head_dim,
        0,
        window_tokens=view.required_int("sliding_window"),
        indexer_bytes=index_dim + INDEXER_BYTES_PER_TOKEN_BASE if index_dim else 0,
        compress_ratio=ratio,
        label=f"compressed {ratio}:1" if ratio else "sliding",
    )


def _source_tokens(view: ConfigView, family: str) -> int | None:
    if family == "whisper":
        return view.optional_int("max_source_positions") or 1500
    if family in ("mllama", "mllama_text_model"):
        vision = view.outer.get("vision_config")
        if isinstance(vision, Mapping):
            side, patch = vision.get("image_size", 560), vision.get("patch_size", 14)
            if isinstance(side, int) and isinstance(patch, int) and patch:
                return ((side // patch) ** 2 + 1) * int(vision.get("max_num_tiles", _VIEWED_AS_IMAGE_TOKENS))
        return 1601 * _VIEWED_AS_IMAGE_TOKENS  # (560 / 14)^2 + 1 per tile
    return view.max_model_len


def _uniform_dims(view: ConfigView, index: int, where: str) -> tuple[int, int, int]:
    """Heads, key dim and value dim of one layer; `where` is full, window or cross."""
    per_layer = view.fields.get("num_key_value_heads_per_layer")
    heads = per_layer[index] if isinstance(per_layer, list) and index < len(per_layer) else view.num_kv_heads
    if not isinstance(heads, int) or heads < 1:
        raise ModelBroken(f"config.json gives layer {index} {heads!r} key/value heads", hint="It must be 1 or more.")
    dim = view.head_dim
    return heads, dim, view.optional_int("v_head_dim") or dim


def _gemma4_dims(view: ConfigView, index: int, where: str) -> tuple[int, int, int]:
    heads, dim, _ = _uniform_dims(view, index, where)
    if where == "full":
        dim = view.optional_int("global_head_dim") or dim
        if view.fields.get("attention_k_eq_v"):
            heads = view.optional_int("num_global_key_value_heads") or heads
    return heads, dim, dim


def _mimo_v2_dims(view: ConfigView, index: int, where: str) -> tuple[int, int, int]:
    prefix = "swa_" if where == "window" else ""
    heads = view.optional_int(f"{prefix}num_key_value_heads") or view.num_kv_heads
    key = view.optional_int(f"{prefix}head_dim") or view.head_dim
    return heads, key, view.optional_int(f"{prefix}v_head_dim") or view.optional_int("v_head_dim") or key


def _decilm_dims(view: ConfigView, index: int, where: str) -> tuple[int, int, int]:
    blocks = view.fields.get("block_configs")
    if isinstance(blocks, list) and isinstance(blocks[index], Mapping):
        per_group = blocks[index].get("attention", {}).get("n_heads_in_group")
        if isinstance(per_group, int) and per_group > 0:
            return view.num_heads // per_group, view.head_dim, view.head_dim
    return _uniform_dims(view, index, where)


def _decoder_dims(view: ConfigView, index: int, where: str) -> tuple[int, int, int]:
    heads = view.optional_int("decoder_attention_heads") or view.num_heads
    dim = view.optional_int("d_kv") or view.required_int("hidden_size") // heads
    return heads, dim, dim


_DIMS = {
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), _gemma4_dims),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), _mimo_v2_dims),
    **dict.fromkeys(("decilm", "deci", "nemotron-nas"), _decilm_dims),
    **dict.fromkeys(("whisper", "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100", "marian"), _decoder_dims),
}
_BUILDERS = {
    "none": _none,
    "full": _attention,
    "sliding": _windowed(LayerKind.SLIDING, "sliding_window"),
    "chunked": _windowed(LayerKind.CHUNKED, "attention_chunk_size"),
    "mla": _latent,
    "cross": _cross,
    "compressed": _compressed,
}


def _block_index_bytes(view: ConfigView, family: str, index: int) -> int:
    """MiniMax M3's block-sparse layers keep one 16-bit index key per token beside keys and values.

    Source: vLLM's models/minimax_m3 (one index-key vector per token, sparse_index_dim wide).
    """
    if not family.startswith("minimax_m3"):
        return 0
    listed = view.strings("layer_types")
    nested = view.part("sparse_attention_config")
    frequency = nested.get("sparse_attention_freq")
    is_sparse = (listed is not None and index < len(listed) and "sparse" in listed[index]) or (
        isinstance(frequency, list) and index < len(frequency) and bool(frequency[index])
    )
    width = nested.get("sparse_index_dim") or view.get("index_head_dim") or 128
    return 2 * int(width) if is_sparse else 0


def _share(view: ConfigView, family: str, layers: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
    """The last `num_kv_shared_layers` layers read an earlier layer's cache (Gemma 3n, Gemma 4)."""
    count = view.count("num_kv_shared_layers")
    if not count:
        return layers
    first = view.num_layers - count
    return tuple(replace(x, kind=LayerKind.SHARED) if x.index >= first else x for x in layers)


def _notes(view: ConfigView, family: str) -> tuple[str, ...]:
    notes = []
    if not family:
        notes.append("The config names no architecture: taken as plain attention of the given shape.")
    if view.fields.get("_note"):
        notes.append(f"Catalogue entry: {view.fields['_note']}.")
    if family.startswith("minimax_m3") and not (view.get("sparse_attention_config") or view.get("layer_types")):
        notes.append("The config does not say which layers are block-sparse: their index keys are not counted.")
    if view.fields.get("sliding_window") and view.fields.get("use_sliding_window") is False:
        notes.append("sliding_window is given but switched off (use_sliding_window: false): full attention.")
    return tuple(notes)


__all__ = ["LayerKind", "LayerShape", "ModelShape", "StatePart"]
