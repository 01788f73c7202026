"""GGUF conversion, compared with the model that was put in and with transformers' own GGUF reader."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from kvctl.engine.gguf_convert import _to_bf16, convert_gguf, converted_size_bytes
from kvctl.engine.gguf_file import GgufFile
from kvctl.engine.json_file import read_json_object
from kvctl.engine.model_source import read_model_facts
from kvctl.errors import KvctlError, ModelBroken, ModelNotFound, ModelNotSupported
from tests.support import gguf_files
from tests.support.tiny_models import ALL, LLAMA, TinyModel, build

Q = gguf.GGMLQuantizationType
# llama.cpp scales Gemma's queries by the head's length, whatever query_pre_attn_scalar says.
GEMMA3 = TinyModel("gemma3", lambda: transformers.Gemma3TextConfig(
    vocab_size=320, hidden_size=48, intermediate_size=80, num_hidden_layers=7, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=24, max_position_embeddings=512,
))  # fmt: skip
# What llama.cpp's converter can write of the other families: it knows no biases of MLPs.
_NAMES = ("llama", "llama-tied", "llama-one-kv-head", "llama-linear-rope", "mistral-full", "mistral-sliding", "qwen2",
          "qwen3")  # fmt: skip
CONVERTIBLE = [*(tiny for tiny in ALL if tiny.name in _NAMES), GEMMA3]
# Block quantisation needs rows of a multiple of 32.
WIDE = TinyModel("llama-wide", lambda: transformers.LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
))  # fmt: skip


def test_every_family_is_among_the_converted_ones() -> None:
    assert len(CONVERTIBLE) == len(_NAMES) + 1


def make(path: Path, tiny: TinyModel, quant_type: Q = Q.F32, **metadata: Any) -> Any:
    model = build(tiny)
    gguf_files.write_gguf(
        path, gguf_files.model_metadata(model.config) | metadata, gguf_files.model_tensors(model), quant_type
    )
    return model


def convert(path: Path, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    convert_gguf(path, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tiny", CONVERTIBLE, ids=lambda t: t.name)
def test_every_family_comes_back_as_the_model_that_was_put_in(tiny: TinyModel, tmp_path: Path) -> None:
    model = make(tmp_path / "m.gguf", tiny)
    tensors = convert(tmp_path / "m.gguf", tmp_path / "out")
    expected = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight" or k in tensors}
    assert set(tensors) == set(expected)
    assert ("lm_head.weight" in tensors) == (not model.config.tie_word_embeddings)
    for name, value in expected.items():
        # Gemma's norms went through +1 and -1 in float32
        torch.testing.assert_close(tensors[name].float(), value.bfloat16().float(), rtol=0.008, atol=1e-6)
        if not name.endswith("norm.weight"):
            assert torch.equal(tensors[name], value.bfloat16()), name


@pytest.mark.parametrize("tiny", CONVERTIBLE, ids=lambda t: t.name)
def test_the_converted_config_makes_the_same_model(tiny: TinyModel, tmp_path: Path) -> None:
    model = make(tmp_path / "m.gguf", tiny)
    tensors = convert(tmp_path / "m.gguf", tmp_path / "out")
    model.load_state_dict(tensors, strict=False)  # the same weights, so that only the configs can differ
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(3, 60).unsqueeze(0)  # longer than the sliding windows
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("quant_type", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16], ids=lambda q: q.name)
def test_each_quantisation_reads_as_transformers_reads_it(quant_type: Q, tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", WIDE, quant_type)
    ours = convert(tmp_path / "m.gguf", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file="m.gguf",
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 200_000, dtype=np.uint32)
    bits = np.concatenate([bits, np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 1],
                                          dtype=np.uint32)])  # fmt: skip
    values = bits.view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16()
    ours = torch.from_numpy(_to_bf16(values).view(np.int16)).view(torch.bfloat16)
    finite = ~torch.isnan(expected)
    assert torch.equal(ours[finite].view(torch.int16), expected[finite].view(torch.int16))
    assert torch.isnan(ours[~finite]).all()


def test_facts_of_a_converted_folder_are_those_of_the_file(tmp_path: Path) -> None:
    model = make(tmp_path / "m.gguf", LLAMA, **{"tokenizer.chat_template": "{{ messages }}<|im_end|>"})
    convert(tmp_path / "m.gguf", tmp_path / "out")
    facts = read_model_facts(tmp_path / "out")
    config = read_json_object(tmp_path / "out" / "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert facts.max_model_len == model.config.max_position_embeddings
    assert facts.vocab_size == model.config.vocab_size
    assert facts.eos_token_ids == (2,)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}<|im_end|>"
    assert config["rms_norm_eps"] == model.config.rms_norm_eps  # not 9.99999997e-07


def test_the_end_of_turn_of_the_chat_template_ends_a_text_too(tmp_path: Path) -> None:
    make(
        tmp_path / "m.gguf",
        LLAMA,
        **{"tokenizer.ggml.eos_token_id": 0, "tokenizer.chat_template": "{{ messages[0] }}<|im_end|>"},
    )
    convert(tmp_path / "m.gguf", tmp_path / "out")
    assert read_model_facts(tmp_path / "out").eos_token_ids == (0, 2)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered_from_the_factors(factor: float, tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, max_position_embeddings=131_072, rope_parameters=rope,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    plain = 1 / 500_000.0 ** (torch.arange(0, 128, 2).float() / 128)
    factors = plain / model.model.rotary_emb.inv_freq  # what llama.cpp's converter stores
    tensors = gguf_files.model_tensors(model) | {"rope_freqs.weight": factors.numpy()}
    gguf_files.write_gguf(tmp_path / "m.gguf", gguf_files.model_metadata(config), tensors)
    convert(tmp_path / "m.gguf", tmp_path / "out")
    scaling = json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"]
    assert scaling == {k: v for k, v in rope.items() if k != "rope_theta"}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(again.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    tensors["rope_freqs.weight"] = factors.numpy() * np.linspace(1, 1.2, 64, dtype=np.float32)
    gguf_files.write_gguf(tmp_path / "other.gguf", gguf_files.model_metadata(config), tensors)
    with pytest.raises(ModelNotSupported, match="rotary frequency"):
        convert(tmp_path / "other.gguf", tmp_path / "other")


def test_the_size_is_known_before_anything_is_written(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA)
    predicted = converted_size_bytes(tmp_path / "m.gguf")
    tensors = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert predicted == sum(t.numel() * 2 for t in tensors.values())


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.pre": "some-new-rule"}, "some-new-rule"),
        ({"split.count": 3}, "3 parts"),
        ({"llama.attention.value_length": 4}, "different length"),
        ({"llama.rope.dimension_count": 4}, "of 4 of 8 dimensions"),
    ],
)
def test_what_cannot_be_served_is_named(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA, **metadata)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelNotSupported, match=named):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.embedding_length": 52}, "token_embd.weight has shape"),
        ({"llama.block_count": 4_000_000_000}, "4,000,000,000 layers"),
        ({"llama.block_count": 5}, r"blk\.3\..* is missing"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.context_length": "long"}, "context_length is 'long'"),
        ({"tokenizer.ggml.eos_token_id": 4000}, "eos token is 4000"),
        ({"tokenizer.ggml.tokens": ["a", "b"]}, "2 tokens"),
    ],
)
def test_a_file_that_contradicts_itself_is_broken(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA, **metadata)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelBroken, match=named):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("value", [7, -1.5, "text", True, [], [1, 2], ["a", ""]], ids=repr)
def test_metadata_of_any_type_is_read_or_refused_and_never_a_stack(value: Any, tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA)
    with GgufFile(tmp_path / "m.gguf") as file:
        keys = [key for key in file.metadata if key != "general.architecture"]
        keys += ["split.count", "general.alignment", "tokenizer.chat_template", "llama.rope.scaling.type"]
        keys += ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.unknown_token_id", "llama.expert_count"]
    assert len(keys) > 15
    for number, key in enumerate(keys):
        make(tmp_path / "m.gguf", LLAMA, **{key: value})
        folder = tmp_path / f"out{number}"
        folder.mkdir()
        try:
            converted_size_bytes(tmp_path / "m.gguf")
            convert_gguf(tmp_path / "m.gguf", folder)
        except KvctlError as error:
            assert str(tmp_path) in error.message


def test_more_layers_than_the_metadata_says_are_not_dropped_silently(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA, **{"llama.block_count": 2})
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelNotSupported, match=r"no tensor blk\.2\."):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_no_file_an_empty_file_and_another_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no file"):
        convert_gguf(tmp_path / "none.gguf", tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelBroken, match="is empty"):
        convert_gguf(tmp_path / "empty.gguf", tmp_path)
    (tmp_path / "page.gguf").write_text("<html>not found</html>")
    with pytest.raises(ModelBroken, match="not a GGUF file"):
        convert_gguf(tmp_path / "page.gguf", tmp_path)


def test_other_versions_and_byte_orders_are_named(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    for version, named in ((struct.pack("<I", 1), "version 1"), (struct.pack(">I", 3), "big-endian")):
        data[4:8] = version
        (tmp_path / "v.gguf").write_bytes(data)
        with pytest.raises(ModelNotSupported, match=named):
            convert_gguf(tmp_path / "v.gguf", tmp_path)


def test_a_file_cut_anywhere_is_broken_and_says_so_at_once(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA)
    data = (tmp_path / "m.gguf").read_bytes()
    cuts = sorted({*range(1, 400, 7), *range(400, len(data), len(data) // 60), len(data) - 1})
    for cut in cuts:
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        with pytest.raises(ModelBroken):
            converted_size_bytes(tmp_path / "cut.gguf")
    assert len(cuts) > 100


def test_random_damage_never_escapes_as_another_exception(tmp_path: Path) -> None:
    make(tmp_path / "m.gguf", LLAMA)
    data = (tmp_path / "m.gguf").read_bytes()
    head = len(data) - sum(t.numel() * 4 for t in build(LLAMA).state_dict().values())
    dice = random.Random(7)
    refused = 0
    for turn in range(300):
        damaged = bytearray(data)
        for _ in range(dice.choice((1, 1, 3, 20))):
            damaged[dice.randrange(4, head)] = dice.randrange(256)
        (tmp_path / "d.gguf").write_bytes(damaged)
        folder = tmp_path / f"out{turn}"
        folder.mkdir()
        try:
            convert_gguf(tmp_path / "d.gguf", folder)
        except KvctlError:
            refused += 1
    assert refused > 100  # the others hit names, fillers or numbers that mean the same
