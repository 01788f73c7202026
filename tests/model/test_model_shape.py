"""What each family's config.json says about its layers: kinds, heads, dims, windows; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from kvctl.errors import ModelBroken, ModelNotSupported
from kvctl.model.layer_shape import LayerKind
from kvctl.model.lookup import find_model
from kvctl.model.model_shape import ModelShape

CATALOGUE = Path(__file__).parent.parent.parent / "profiles" / "models"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def shape_of(name: str) -> ModelShape:
    return ModelShape.from_config(find_model(name).config)


@pytest.mark.parametrize("path", sorted(CATALOGUE.glob("*/*.json")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_catalogue_model_is_read(path: Path) -> None:
    shape = ModelShape.from_config(json.loads(path.read_text()))
    assert shape.num_layers >= 1
    assert {layer.index for layer in shape.layers} == set(range(shape.num_layers))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("meta-llama/Llama-3.1-8B", {"full": 32}),
        ("google/gemma-3-27b-it", {"sliding": 52, "full": 10}),
        ("google/gemma-2-9b", {"full": 21, "sliding": 21}),
        ("openai/gpt-oss-120b", {"sliding": 18, "full": 18}),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", {"chunked": 36, "full": 12}),
        ("deepseek-ai/DeepSeek-R1", {"mla": 61}),
        ("deepseek-ai/DeepSeek-V3.2", {"dsa": 61}),
        ("moonshotai/Kimi-K3", {"kda": 69, "mla": 24}),
        ("Qwen/Qwen3.5-35B-A3B", {"gdn": 30, "full": 10}),
        ("ai21labs/Jamba-v0.1", {"mamba1": 28, "full": 4}),
        ("tiiuae/Falcon-H1-1.5B-Instruct", {"full": 24, "mamba2": 24}),
        ("nvidia/Nemotron-H-56B-Base-8K", {"mamba2": 54, "none": 54, "full": 10}),
        ("LGAI-EXAONE/EXAONE-4.0-32B", {"sliding": 48, "full": 16}),
        ("google/gemma-4-E4B-it", {"sliding": 20, "full": 4, "shared": 18}),
        ("google/gemma-3n-E4B-it", {"sliding": 16, "full": 4, "shared": 15}),
        ("openai/whisper-large-v3", {"full": 32, "cross": 32}),
        ("stepfun-ai/Step-3.7-Flash", {"full": 12, "sliding": 33}),
        ("mistralai/Mistral-7B-v0.1", {"sliding": 32}),
    ],
)
def test_families_have_their_kinds_of_layers(name: str, kinds: dict[str, int]) -> None:
    assert shape_of(name).kind_counts == kinds


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {}),
        ("gemma3_text", {"num_hidden_layers": 26}),
        ("gemma3n_text", {}),
        ("cohere2", {"num_hidden_layers": 40}),
        ("olmo3", {"num_hidden_layers": 32}),
        ("exaone4", {"num_hidden_layers": 32, "sliding_window_pattern": 4}),
        ("llama4_text", {"num_hidden_layers": 48}),
        ("gpt_oss", {"num_hidden_layers": 24}),
        ("qwen3_next", {"num_hidden_layers": 48}),
        ("jamba", {"num_hidden_layers": 32}),
    ],
)
def test_unsaid_patterns_are_those_of_transformers(family: str, fields: dict[str, Any]) -> None:
    """transformers fills `layer_types`; we must find the same kinds from a config that leaves them out."""
    theirs = CONFIG_MAPPING[family](**fields)
    raw = {k: v for k, v in theirs.to_dict().items() if k not in ("layer_types", "layers_block_type")}
    ours = ModelShape.from_config({**raw, "model_type": family})
    listed = getattr(theirs, "layer_types", None) or theirs.layers_block_type
    windowed = {"sliding_attention": "sliding", "chunked_attention": "chunked", "linear_attention": "state"}
    kinds = [windowed.get(name, "state" if name == "mamba" else "full") for name in listed]
    shared = raw.get("num_kv_shared_layers") or 0
    expected = kinds[: len(kinds) - shared] + ["shared"] * shared
    assert [layer.kind.value for layer in ours.layers] == expected


def test_head_dim_is_not_hidden_over_heads_when_given() -> None:
    layer = shape_of("mistralai/Mistral-Nemo-Instruct-2407").layers[0]
    assert (layer.num_kv_heads, layer.key_dim) == (8, 128)  # 5120 / 32 would be 160


def test_sliding_window_that_is_switched_off_is_full_attention_and_told() -> None:
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    assert shape.kind_counts == {"full": 28}
    assert any("switched off" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("config", "heads", "dim"),
    [
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 12, 64),
        ({"model_type": "gpt_bigcode", "n_layer": 4, "n_head": 48, "n_embd": 6144, "multi_query": True}, 1, 128),
        ({"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71, "hidden_size": 4544}, 1, 64),
        (
            {"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 128, "hidden_size": 8192,
             "new_decoder_architecture": True, "num_kv_heads": 8}, 8, 64,
        ),
        (
            {"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32, "hidden_size": 4096,
             "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2}, 2, 128,
        ),
        ({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096}, 32, 128),
        (
            {"model_type": "dbrx", "n_layers": 2, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
            8, 128,
        ),
    ],
)  # fmt: skip
def test_old_names_are_understood(config: dict[str, Any], heads: int, dim: int) -> None:
    layer = ModelShape.from_config(config).layers[0]
    assert (layer.num_kv_heads, layer.key_dim) == (heads, dim)


@pytest.mark.parametrize("outer", ["text_config", "llm_config", "language_config"])
def test_a_nested_language_model_is_found(outer: str) -> None:
    shape = ModelShape.from_config({"model_type": "some_vlm", outer: LLAMA, "vision_config": {"depth": 2}})
    assert shape.kind_counts == {"full": 32}


def test_gemma4_full_layers_have_their_own_heads_and_head_size() -> None:
    layers = shape_of("nvidia/Gemma-4-31B-IT-NVFP4").layers
    full = next(x for x in layers if x.kind is LayerKind.FULL)
    sliding = next(x for x in layers if x.kind is LayerKind.SLIDING)
    assert (full.num_kv_heads, full.key_dim) == (4, 512)
    assert (sliding.num_kv_heads, sliding.key_dim) == (16, 256)


def test_yarn_stretches_the_original_length() -> None:
    assert shape_of("deepseek-ai/DeepSeek-R1").max_model_len == 4096 * 40


def test_llama3_scaling_is_in_the_given_length_already() -> None:
    assert shape_of("meta-llama/Llama-3.1-8B").max_model_len == 131072


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "zork", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64},
        {"architectures": ["ZorkForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64},
        {**LLAMA, "layer_types": ["full_attention", "wavelet_attention"] * 16},
        {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "kv_lora_rank": 16},
        {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "sliding_window": 16},
    ],
)
def test_what_is_not_known_is_not_guessed(config: dict[str, Any]) -> None:
    with pytest.raises(ModelNotSupported, match="cannot tell") as caught:
        ModelShape.from_config(config)
    assert caught.value.exit_code == 3


def test_a_bare_shape_is_plain_attention_and_says_so() -> None:
    shape = ModelShape.from_config(
        {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    )
    assert shape.kind_counts == {"full": 80}
    assert any("no architecture" in note for note in shape.notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_attention_heads": -4}, "num_attention_heads = -4"),
        ({"num_attention_heads": "many"}, "many"),
        ({"num_attention_heads": 24, "num_key_value_heads": 24}, "not a multiple"),
        ({"num_key_value_heads": 7}, "not a multiple"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_hidden_layers": 2.5}, "2.5"),
        ({"num_hidden_layers": True}, "True"),
        ({"layer_types": ["full_attention"]}, "1 layer types"),
        ({"layer_types": "full"}, "list of names"),
    ],
)
def test_impossible_configs_are_told_in_a_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelBroken, match=message) as caught:
        ModelShape.from_config({**LLAMA, **change})
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("config", [{}, {"x": 1}, {"tokenizer_class": "X"}])
def test_another_json_is_not_a_model(config: dict[str, Any]) -> None:
    with pytest.raises(ModelBroken, match="not the config"):
        ModelShape.from_config(config)
