"""Which kind each layer of a model is: the order of full, windowed, latent and recurrent layers.

Knows families by their `model_type` and the patterns that their configs leave unsaid; no sizes. A list in the
config (`layer_types` and its older spellings) always wins. Names used here: full, sliding, chunked, mla,
mamba1, mamba2, gdn, kda, lightning, conv, lru, cross, none, and two of them joined by '+'. Floor 0.
"""

from collections.abc import Callable

from kvctl.errors import ModelBroken, ModelNotSupported
from kvctl.model.config_view import ConfigView
from kvctl.model.families import BY_ARCHITECTURE, LATENT, PLAIN, TELLING, WINDOW_ON_ALL

Pattern = Callable[[ConfigView], list[str]]

_LISTED = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "global": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "sliding_window_attention": "sliding",
    "sliding_window": "sliding",
    "local": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "conv": "conv",
    "short_conv": "conv",
    "moe": "none",
    "mlp": "none",
    "E": "none",
    "-": "none",
    "*": "full",
    "minimax_m3_sparse": "full",
}
_LINEAR = {
    "qwen3_next": "gdn",
    "qwen3_5_text": "gdn",
    "qwen3_5_moe_text": "gdn",
    "qwen3_5": "gdn",
    "qwen3_5_moe": "gdn",
    "olmo_hybrid": "gdn",
    "kimi_linear": "kda",
    "minimax": "lightning",
    "minimax_text_01": "lightning",
}
_MAMBA = {
    "jamba": "mamba1",
    "bamba": "mamba2",
    "granitemoehybrid": "mamba2",
    "nemotron_h": "mamba2",
    "zamba2": "mamba2",
    "falcon_h1": "mamba2",
    "mamba2": "mamba2",
}


def listed_layers(view: ConfigView) -> list[str] | None:
    """The kinds that the config itself lists, or None.

    Raises:
        ModelNotSupported: a kind of layer that is not known here.
        ModelBroken: fewer kinds than layers.
    """
    names = view.strings("layer_types") or view.strings("layers_block_type") or view.strings("layer_block_types")
    if names is None:
        pattern = view.fields.get("hybrid_override_pattern")
        if not isinstance(pattern, str):
            return None
        names = list(pattern)
    count = view.num_layers
    if len(names) < count:
        raise ModelBroken(f"config.json lists {len(names)} layer types for {count} layers", hint="The two must agree.")
    found = []
    for name in names[:count]:  # some lists go on with the draft (MTP) layers
        if name in ("linear_attention", "linear"):
            kind = _LINEAR.get(view.model_type) or _MAMBA.get(view.model_type)
        elif name in ("mamba", "M", "mamba2"):
            kind = _MAMBA.get(view.model_type)
        elif name == "hybrid" and view.model_type == "zamba2":
            kind = "full+mamba2"
        elif name == "recurrent":
            kind = "lru"
        else:
            kind = _LISTED.get(name)
        if kind is None:
            raise ModelNotSupported(
                f"cannot tell: layer type {name!r} of {view.architecture} is not known here",
                hint="Its memory per token is unknown; nothing is guessed.",
            )
        found.append("mla" if kind == "full" and view.get("kv_lora_rank") else kind)
    return found


def _plain(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    window = view.optional_int("sliding_window")
    count = view.num_layers
    if window is None or view.fields.get("use_sliding_window") is False:
        return ["full"] * count
    if view.model_type in WINDOW_ON_ALL:
        return ["sliding"] * count
    if view.fields.get("use_sliding_window"):  # Qwen2: the layers from max_window_layers on are windowed
        first = view.count("max_window_layers")
        return ["full" if i < first else "sliding" for i in range(count)]
    return ["full"] * count


def _every(period: int, *, full_at: int = -1, window: str = "sliding") -> Pattern:
    """Full attention on every `period`-th layer (`full_at` within the period), `window` on the others."""

    def pattern(view: ConfigView) -> list[str]:
        listed = listed_layers(view)
        if listed is not None:
            return listed
        given = view.fields.get("sliding_window_pattern") or view.fields.get("_sliding_window_pattern")
        every = given if isinstance(given, int) and given > 0 else period
        place = full_at % every
        return ["full" if i % every == place else window for i in range(view.num_layers)]

    return pattern


def _exaone4(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    pattern = view.fields.get("sliding_window_pattern")
    count = view.num_layers
    if view.get("sliding_window") is None or not pattern:
        return ["full"] * count
    if not isinstance(pattern, str) and not (isinstance(pattern, int) and 0 < pattern <= count):
        raise ModelBroken(f"config.json says sliding_window_pattern = {str(pattern)[:40]}", hint="Give LLLG or 4.")
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    kinds = ["full" if letters[i % len(letters)] == "G" else "sliding" for i in range(count)]
    kinds[-1] = "full"
    return kinds


def _llama4(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    count = view.num_layers
    if view.get("attention_chunk_size") is None:
        return ["full"] * count
    rope = view.ints("no_rope_layers") or []
    interval = view.optional_int("no_rope_layer_interval") or 4
    uses_rope = [bool(v) for v in rope] if len(rope) == count else [(i + 1) % interval != 0 for i in range(count)]
    return ["chunked" if r else "full" for r in uses_rope]


def _gdn_interval(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    interval = view.optional_int("full_attention_interval") or 4
    return ["full" if (i + 1) % interval == 0 else "gdn" for i in range(view.num_layers)]


def _kimi_linear(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    nested = view.part("linear_attn_config")
    full, kda = nested.get("full_attn_layers"), nested.get("kda_layers")
    if not isinstance(full, list) or not isinstance(kda, list):
        raise ModelBroken("config.json does not say linear_attn_config.full_attn_layers", hint="Give the full config.")
    attention = set(full)  # counted from 1
    return ["mla" if i + 1 in attention else "kda" for i in range(view.num_layers)]


def _minimax(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    kinds = view.ints("attn_type_list")
    if kinds is None or len(kinds) < view.num_layers:
        raise ModelBroken("config.json does not say attn_type_list", hint="Give the model's full config.json.")
    return ["full" if kind == 1 else "lightning" for kind in kinds[: view.num_layers]]


def _jamba(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    period, offset = view.required_int("attn_layer_period"), view.count("attn_layer_offset")
    return ["full" if i % period == offset else "mamba1" for i in range(view.num_layers)]


def _bamba(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    attention = set(view.ints("attn_layer_indices") or [])
    return ["full" if i in attention else "mamba2" for i in range(view.num_layers)]


def _lfm2(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    attention = view.ints("full_attn_idxs")
    count = view.num_layers
    return ["full"] * count if attention is None else ["full" if i in set(attention) else "conv" for i in range(count)]


def _recurrent_gemma(view: ConfigView) -> list[str]:
    names = view.strings("block_types") or view.strings("_block_types") or ["recurrent", "recurrent", "attention"]
    return ["lru" if names[i % len(names)] == "recurrent" else "sliding" for i in range(view.num_layers)]


def _mllama(view: ConfigView) -> list[str]:
    cross = set(view.ints("cross_attention_layers") or [])
    return ["cross" if i in cross else "full" for i in range(view.num_layers)]


def _mimo_v2(view: ConfigView) -> list[str]:
    listed = listed_layers(view)
    if listed is not None:
        return listed
    pattern = view.ints("hybrid_layer_pattern")
    if pattern is None or len(pattern) < view.num_layers:
        raise ModelBroken("config.json does not say hybrid_layer_pattern", hint="Give the model's full config.json.")
    return ["sliding" if flag else "full" for flag in pattern[: view.num_layers]]


def _deepseek_v4(view: ConfigView) -> list[str]:
    ratios = view.ints("compress_ratios")
    if ratios is None or len(ratios) < view.num_layers:
        raise ModelBroken("config.json does not say compress_ratios", hint="Give the model's full config.json.")
    return [f"compressed:{ratio}" for ratio in ratios[: view.num_layers]]


def _decilm(view: ConfigView) -> list[str]:
    blocks = view.fields.get("block_configs")
    if not isinstance(blocks, list):
        if view.ints("num_key_value_heads_per_layer") is None:
            raise ModelBroken("config.json says neither block_configs nor num_key_value_heads_per_layer")
        return ["full"] * view.num_layers
    skipped = [isinstance(b, dict) and b.get("attention", {}).get("no_op") for b in blocks]
    if len(blocks) < view.num_layers:
        raise ModelBroken(f"config.json has {len(blocks)} block_configs for {view.num_layers} layers")
    return ["none" if skip else "full" for skip in skipped[: view.num_layers]]


def _all(kind: str) -> Pattern:
    return lambda view: [kind] * view.num_layers


_PATTERNS: dict[str, Pattern] = {
    **dict.fromkeys(PLAIN, _plain),
    **dict.fromkeys(LATENT, _all("mla")),
    **dict.fromkeys(("gemma2",), _every(2, full_at=1)),
    **dict.fromkeys(("gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified_text"), _every(6)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _every(5)),
    **dict.fromkeys(("cohere2", "cohere2_moe", "olmo3"), _every(4)),
    "gpt_oss": _every(2, full_at=1),
    "longcat_flash": _all("mla+mla"),  # two attention blocks in every layer
    **dict.fromkeys(("decilm", "deci", "nemotron-nas"), _decilm),
    "exaone4": _exaone4,
    "exaone_moe": _exaone4,
    **dict.fromkeys(("llama4", "llama4_text"), _llama4),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gdn_interval),
    "olmo_hybrid": _gdn_interval,
    "kimi_linear": _kimi_linear,
    **dict.fromkeys(("minimax", "minimax_text_01"), _minimax),
    "jamba": _jamba,
    "bamba": _bamba,
    "granitemoehybrid": _bamba,
    "nemotron_h": _bamba,
    "zamba2": _bamba,
    "falcon_h1": _all("full+mamba2"),
    **dict.fromkeys(("mamba", "falcon_mamba"), _all("mamba1")),
    "mamba2": _all("mamba2"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _lfm2),
    "recurrent_gemma": _recurrent_gemma,
    **dict.fromkeys(("mllama", "mllama_text_model"), _mllama),
    **dict.fromkeys(
        ("whisper", "t5", "mt5", "umt5", "bart", "mbart", "pegasus", "m2m_100", "marian"), _all("full+cross")
    ),
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), _mimo_v2),
    **dict.fromkeys(("minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"), _plain),
    **dict.fromkeys(("step3p5", "step3p7", "step3p7_text"), _plain),
    "deepseek_v4": _deepseek_v4,
}


def resolve_family(view: ConfigView) -> str:
    """The family whose rules hold for this config: its model type, or what its class name stands for.

    '' is a config without any name: plain attention of the given shape, if nothing in it says otherwise.

    Raises:
        ModelNotSupported: a family that is not known here.
    """
    for name in (view.model_type, view.outer_model_type):
        if name.lower() in _PATTERNS:
            return name.lower()
    classes = view.class_names
    for name in classes:
        if name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    if not view.model_type and not classes:
        telling = [field for field in TELLING if view.fields.get(field)]
        if not telling:
            return ""
        raise ModelNotSupported(
            f"cannot tell: the config names no architecture but sets {telling[0]}",
            hint="Add its model_type; the meaning of that field depends on it.",
        )
    raise ModelNotSupported(
        f"cannot tell: architecture {view.architecture} (model_type {view.model_type!r}) is not known here",
        hint="What its layers keep is unknown; nothing is guessed.",
    )


def layer_kinds(view: ConfigView, family: str) -> list[str]:
    """The kind of every layer, in order, by the names of this module's docstring.

    Raises:
        ModelNotSupported: a layer type that is not known here.
        ModelBroken: fields that the pattern needs are missing or contradict each other.
    """
    return _plain(view) if not family else _PATTERNS[family](view)


def known_families() -> list[str]:
    """Every model type with a rule, sorted."""
    return sorted(_PATTERNS)
