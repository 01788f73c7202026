"""config.json -> DecoderConfig, against transformers' own reading of the same file and hand-copied real configs."""

import json

import pytest
import transformers

from kvctl.engine.models.decoder_config import RopeConfig
from kvctl.engine.models.registry import SUPPORTED_ARCHITECTURES, parse_decoder_config
from kvctl.errors import ModelBroken, ModelNotSupported
from tests.support import tiny_models

LLAMA_31_8B = {  # as published: the spelling of transformers 4
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


@pytest.mark.parametrize("tiny", tiny_models.ALL, ids=lambda tiny: tiny.name)
def test_sizes_and_windows_are_read_as_transformers_reads_them(tiny):
    config = tiny.make_config()
    config.architectures = [tiny_models.architecture(config)]
    parsed = parse_decoder_config(json.loads(config.to_json_string(use_diff=True)))
    assert parsed.num_layers == config.num_hidden_layers
    assert parsed.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert parsed.num_kv_heads == config.num_key_value_heads
    assert parsed.vocab_size == config.vocab_size
    if parsed.ropes[0].rope_type in ("default", "llama3"):  # others are stretched: test_model_source
        assert parsed.max_position_tokens == config.max_position_embeddings
    assert parsed.tie_word_embeddings == config.tie_word_embeddings
    window = config.sliding_window if hasattr(config, "sliding_window") else None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        expected = (window,) * config.num_hidden_layers
    else:
        expected = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert parsed.windows == expected


def test_llama_31_keeps_its_frequency_scaling():
    parsed = parse_decoder_config(LLAMA_31_8B)
    assert parsed.head_dim == 128
    assert (
        parsed.ropes
        == (
            RopeConfig(
                500_000.0, "llama3", 8.0, original_max_position_tokens=8192, low_freq_factor=1, high_freq_factor=4
            ),
        )
        * 32
    )
    assert parsed.windows == (None,) * 32


def test_qwen25_has_qkv_biases_and_no_window_unless_it_says_so():
    parsed = parse_decoder_config(QWEN25_7B)
    assert (parsed.qkv_bias, parsed.output_bias, parsed.qk_norm) == (True, False, False)
    assert parsed.windows == (None,) * 28
    sliding = parse_decoder_config(QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 20})
    assert sliding.windows == (None,) * 20 + (131072,) * 8


def test_gemma3_alternates_five_sliding_layers_with_one_full_and_two_rope_bases():
    parsed = parse_decoder_config(GEMMA3_1B)
    assert [index for index, window in enumerate(parsed.windows) if window is None] == [5, 11, 17, 23]
    assert {rope.theta for rope, w in zip(parsed.ropes, parsed.windows, strict=True) if w is None} == {1_000_000.0}
    assert {rope.theta for rope, w in zip(parsed.ropes, parsed.windows, strict=True) if w == 512} == {10_000.0}
    assert parsed.tie_word_embeddings
    assert parsed.embedding_scale == pytest.approx(1152**0.5)


def test_old_and_new_spelling_of_rope_mean_the_same():
    old = LLAMA_31_8B
    new = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert parse_decoder_config(new) == parse_decoder_config(old)


def test_gemma3_4b_leaves_out_what_equals_the_defaults():
    published = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    parsed = parse_decoder_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": published})
    theirs = transformers.Gemma3Config(text_config=published).text_config
    assert (parsed.num_heads, parsed.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (parsed.head_dim, parsed.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert parsed.windows.count(None) == theirs.layer_types.count("full_attention")
    assert parsed.ropes[5] == RopeConfig(1_000_000.0, "linear", 8.0, original_max_position_tokens=131_072)
    assert parsed.ropes[0] == RopeConfig(10_000.0)


def test_gemma3_with_pictures_is_read_for_its_text_part():
    parsed = parse_decoder_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA3_1B})
    assert parsed.num_layers == 26
    assert parsed.architecture == "Gemma3ForConditionalGeneration"


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "DeepseekV3ForCausalLM", "BertModel"])
def test_another_architecture_is_refused_with_the_list_of_served_ones(name):
    with pytest.raises(ModelNotSupported) as caught:
        parse_decoder_config({"architectures": [name]})
    assert name in caught.value.message
    for supported in SUPPORTED_ARCHITECTURES:
        assert supported in caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": -3}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_key_value_heads": 5}, "share 5"),
        ({"rope_scaling": "none"}, "rope"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"architectures": []}, "architectures"),
        ({"head_dim": 7}, "even"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0, "rope_scaling": None}, "rope_theta"),
        ({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "original_max"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}}, "low_freq_factor"),
    ],
)
def test_a_contradictory_config_is_named_broken(change, words):
    with pytest.raises(ModelBroken, match=words):
        parse_decoder_config(LLAMA_31_8B | change)


@pytest.mark.parametrize(
    "change",
    [{"query_pre_attn_scalar": 0}, {"query_pre_attn_scalar": -256}, {"final_logit_softcapping": 0.0}],
    ids=lambda change: "-".join(map(str, *change.items())),
)
def test_a_gemma_that_would_divide_by_zero_is_named_broken(change):
    bare = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["Gemma3ForCausalLM"], **bare, "num_key_value_heads": 4, "vocab_size": 100}
    with pytest.raises(ModelBroken, match=next(iter(change))):
        parse_decoder_config(config | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"partial_rotary_factor": 0.5}, "partial"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ],
)
def test_a_feature_that_would_give_wrong_answers_is_refused(change, words):
    with pytest.raises(ModelNotSupported, match=words):
        parse_decoder_config(LLAMA_31_8B | change)


def test_defaults_of_absent_keys_are_those_of_transformers():
    bare = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    for name, config_class in (
        ("LlamaForCausalLM", transformers.LlamaConfig),
        ("MistralForCausalLM", transformers.MistralConfig),
        ("Qwen2ForCausalLM", transformers.Qwen2Config),
        ("Qwen3ForCausalLM", transformers.Qwen3Config),
    ):
        theirs = config_class(**bare, num_key_value_heads=4, vocab_size=100)
        ours = parse_decoder_config({"architectures": [name], **bare, "num_key_value_heads": 4, "vocab_size": 100})
        assert ours.rms_norm_eps == theirs.rms_norm_eps, name
        assert ours.max_position_tokens == theirs.max_position_embeddings, name
        assert ours.tie_word_embeddings == theirs.tie_word_embeddings, name
        assert ours.ropes[0].theta == theirs.rope_parameters["rope_theta"], name
        assert ours.windows[0] == theirs.sliding_window if hasattr(theirs, "sliding_window") else True, name
