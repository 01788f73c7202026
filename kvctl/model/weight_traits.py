"""How families differ in their matrices, as one table; and what a part of the weights is.

Knows names and flags only; the counting is in weight_mixers.py and weight_ffn.py. Floor 0.
"""

from dataclasses import dataclass
from typing import Literal

Share = Literal["split", "kv", "vocab", "experts", "whole"]


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Some parameters that are stored and shared alike.

    `share`: split over ranks, kv (split, but never below one head), vocab (split by vocabulary rows), experts
    (split over ranks in either way of parallelism), whole (every rank has all). `is_linear`: a quantization
    format applies to it.
    """

    name: str
    num_parameters: int
    share: Share
    is_linear: bool
    layer_index: int | None = None  # None: outside the layers


@dataclass(frozen=True, slots=True)
class Traits:
    """How a family's decoder layer differs from Llama's."""

    gated: bool = True  # three MLP matrices; False: two
    mlp_bias: bool | None = None  # None: the config's mlp_bias says
    qkv_bias: bool | None = None  # None: the config's attention_bias says
    o_bias: bool | None = None
    norm_bias: bool = False  # LayerNorm with bias instead of RMSNorm
    norms: int = 2  # hidden-wide norms in a layer
    qk_norm: Literal["", "head", "full"] = ""
    embed_norm: bool = False
    final_norm: bool = True
    position_offset: int | None = None  # learned positions: this many more rows than the context
    tied: bool = False  # whether embeddings are tied when the config does not say
    head_bias: bool = False
    router_bias: bool = False
    sinks: bool = False  # one learned sink per query head
    expert_bias: bool = False
    bias_field: str = ""  # the field that switches all biases of linear layers, where a family has one


_LLAMA = Traits()
_CLASSIC = Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True, tied=True)
_GEMMA = Traits(norms=4, tied=True)
TRAITS: dict[str, Traits] = {
    **dict.fromkeys(("", "plain", "llama", "yi", "mistral", "mixtral", "internlm3"), _LLAMA),
    **dict.fromkeys(("ministral", "ministral3", "granite", "smollm3", "deepseek"), _LLAMA),
    **dict.fromkeys(("aquila", "cwm", "emu3", "exaone", "granitemoe", "helium", "iquestcoder", "ernie4_5"), _LLAMA),
    "youtu": _LLAMA,
    **dict.fromkeys(("baichuan", "deepseek_llm", "minicpm", "xverse", "skywork", "solar"), _LLAMA),
    **dict.fromkeys(("internlm", "internlm2"), Traits(bias_field="bias")),
    "qwen": Traits(qkv_bias=True, o_bias=False),
    "olmo": Traits(norms=0, final_norm=False),
    "flex_olmo": Traits(qk_norm="full"),
    **dict.fromkeys(("stablelm", "stablelm_epoch"), Traits(norm_bias=True)),
    "phimoe": Traits(norm_bias=True),
    **dict.fromkeys(
        ("falcon", "refinedweb", "refinedwebmodel"),
        Traits(gated=False, norm_bias=True, norms=1, tied=True, bias_field="bias"),
    ),
    "solar_open": Traits(router_bias=True),
    "exaone_moe": Traits(qk_norm="head", router_bias=True),
    "ernie4_5_moe": Traits(tied=True, router_bias=True, bias_field="use_bias"),
    "minicpm3": Traits(tied=True),
    **dict.fromkeys(("minimax", "minimax_text_01"), _LLAMA),
    "kimi_linear": Traits(router_bias=True),
    **dict.fromkeys(("granitemoehybrid", "granitemoeshared"), _LLAMA),
    **dict.fromkeys(("mamba", "falcon_mamba"), Traits(norms=1, tied=True)),
    "mamba2": Traits(norms=1),
    "lfm2": Traits(qk_norm="head", tied=True),
    "sarvam_moe": Traits(router_bias=True),
    "arcee": Traits(gated=False),
    "mellum": Traits(qk_norm="head"),
    **dict.fromkeys(("olmoe", "olmo_hybrid"), Traits(qk_norm="full")),
    **dict.fromkeys(("cohere", "cohere2_moe"), Traits(norms=1, tied=True)),
    "jais2": _CLASSIC,
    "mimo": Traits(o_bias=False),
    "seed_oss": Traits(o_bias=False),
    "phi3": Traits(qkv_bias=False, o_bias=False),
    **dict.fromkeys(
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text"),
        Traits(qkv_bias=True, o_bias=False),
    ),
    "qwen2_moe": Traits(qkv_bias=True, o_bias=False),
    **dict.fromkeys(
        ("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_text", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"),
        Traits(qk_norm="head"),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), Traits(qk_norm="head")
    ),
    "gemma": Traits(tied=True),
    "gemma2": _GEMMA,
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified_text"), _GEMMA),
    **dict.fromkeys(("gemma3", "gemma3_text"), Traits(norms=4, qk_norm="head", tied=True)),
    "glm4": Traits(norms=4, o_bias=False),
    "glm": Traits(o_bias=False),
    "glm4_moe": Traits(o_bias=False, router_bias=True),
    "gpt_oss": Traits(qkv_bias=True, o_bias=True, sinks=True, router_bias=True, expert_bias=True),
    "minimax_m2": Traits(qk_norm="full", router_bias=True),
    **dict.fromkeys(("llama4", "llama4_text"), Traits(qkv_bias=False, o_bias=False)),
    "olmo2": Traits(qk_norm="full"),
    "olmo3": Traits(qk_norm="full"),
    "exaone4": Traits(qkv_bias=False, o_bias=False, qk_norm="head"),
    "cohere2": Traits(norms=1, tied=True),
    "starcoder2": Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True, tied=True),
    "opt": Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True, position_offset=2, tied=True),
    **dict.fromkeys(
        ("gpt2", "gpt_bigcode"),
        Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True, position_offset=0, tied=True),
    ),
    "gptj": Traits(gated=False, mlp_bias=True, qkv_bias=False, o_bias=False, norm_bias=True, norms=1, head_bias=True),
    "gpt_neox": Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True),
    "bloom": Traits(gated=False, mlp_bias=True, qkv_bias=True, o_bias=True, norm_bias=True, tied=True, embed_norm=True),
    "mpt": Traits(gated=False, qkv_bias=False, o_bias=False, tied=True),
    "chatglm": Traits(qkv_bias=True, o_bias=False),
    "phi": _CLASSIC,
    "jamba": Traits(qkv_bias=False, o_bias=False),
    "nemotron_h": Traits(gated=False, norms=1, router_bias=True),
    **dict.fromkeys(("bamba", "falcon_h1"), Traits()),
    "deepseek_v2": Traits(),
    **dict.fromkeys(("deepseek_v3", "kimi_k2", "kimi_k25"), Traits(router_bias=True)),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), Traits(router_bias=True)),
    "deepseek_v4": Traits(),  # its layers are counted in weight_deepseek_v4.py
    "glm4_moe_lite": Traits(router_bias=True),
    "mistral4": Traits(),
}
