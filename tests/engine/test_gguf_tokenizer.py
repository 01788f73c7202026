"""Converted tokenizers, compared with sentencepiece, with the tokenizers package, and with published token ids."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvctl.engine.gguf_file import GgufFile
from kvctl.engine.gguf_tokenizer import generation_config, write_tokenizer
from kvctl.errors import ModelBroken
from tests.support.gguf_files import byte_level_vocabulary, write_gguf

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "In 1998 there were 12345 ways to write 3.14159 and 2,718 to forget it.",
    "def main(argument):\n    return argument  # a comment\n\n\nprint('done')",
    "It's what they'll say: don't, we're, I've, HE'S, you'd.",
    "Grüße aus Köln, déjà vu, señor, naïve façade, smörgåsbord",
    "短い文章と長い文章 и немного русского текста",
    "tabs\tand   several    blanks  and\r\nline ends\r\n",
]
PROBES = [
    *SENTENCES,
    "",
    " ",
    "  ",
    "\n\n\n",
    "foo  12",
    "  lead and trail  ",
    "🙂🎉 \x00\x07",
    "aaaaaaaaaaaaaaaa",
    "a▁b",
    "▁",
]


def random_texts(count: int) -> list[str]:
    dice = random.Random(11)
    alphabet = "abc de12 .,\n\t'éß長🙂"
    return ["".join(dice.choice(alphabet) for _ in range(dice.randrange(1, 40))) for _ in range(count)]


def converted(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    write_gguf(tmp_path / "t.gguf", {"general.architecture": "llama"} | metadata, {})
    with GgufFile(tmp_path / "t.gguf") as file:
        write_tokenizer(file, tmp_path, max_length=512)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(SENTENCES * 40), encoding="utf-8")
    return path


def sentencepiece_metadata(model: sentencepiece.SentencePieceProcessor, *, prefix: bool) -> dict[str, Any]:
    size = model.get_piece_size()
    kinds = [
        2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in range(size)
    ]
    pieces = [model.id_to_piece(i) for i in range(size)]
    user_defined = [i for i, piece in enumerate(pieces) if piece in ("\u2581\u2581", "<turn>", "\n\n")]
    for i in user_defined:
        kinds[i] = 4
        pieces[i] = pieces[i].replace("\u2581", " ")  # as llama.cpp's converter writes them
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


@pytest.mark.parametrize(("prefix", "user_defined"), [(True, []), (False, ["\u2581\u2581", "<turn>", "\n\n"])],
                         ids=["llama", "gemma"])  # fmt: skip
def test_sentencepiece_itself_gives_the_same_ids_and_texts(
    prefix: bool, user_defined: list[str], corpus: Path, tmp_path: Path
) -> None:
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "spm"), model_type="bpe", vocab_size=700, byte_fallback=True,
        add_dummy_prefix=prefix, remove_extra_whitespaces=False, normalization_rule_name="identity",
        user_defined_symbols=user_defined, character_coverage=1.0, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    ours = converted(tmp_path, sentencepiece_metadata(model, prefix=prefix))
    texts = [text for text in PROBES + random_texts(300) if not text.startswith("\u2581")]
    for text in texts:
        ids = model.encode(text)
        assert ours.encode(text).ids == [model.bos_id(), *ids] or not text, text
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == model.decode(ids), text
    assert ours.encode("a</s>b").ids.count(model.eos_id()) == 1  # a control token in a text is one token


# Word, number, other, line ends, blanks: what Llama 3 and Qwen 2 publish in their tokenizer.json.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize(
    ("pre", "splits"),
    [
        ("gpt-2", None),
        ("smollm", "digits"),
        ("llama-bpe", rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"),
        ("qwen2", rf"{_WORDS}|\p{{N}}|{_REST}"),
    ],
)
def test_byte_level_tokenizers_give_the_ids_of_the_one_they_were_made_from(
    pre: str, splits: str | None, corpus: Path, tmp_path: Path
) -> None:
    original = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits in (None, "digits"))
    first = {
        None: [],
        "digits": [pre_tokenizers.Digits(individual_digits=True)],
    }.get(splits, [pre_tokenizers.Split(Regex(splits or ""), behavior="isolated")])
    original.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    original.decoder = decoders.ByteLevel()
    original.train(
        [str(corpus)],
        trainers.BpeTrainer(
            vocab_size=600,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=[AddedToken("<|endoftext|>"), AddedToken("<|im_end|>")],
            show_progress=False,
        ),
    )
    model = json.loads(original.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    ours = converted(
        tmp_path,
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
            "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False,
        },
    )
    for text in PROBES + random_texts(300) + ["<|im_end|>ab<|endoftext|>"]:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)


def test_the_demo_models_tokens_are_the_published_ones(demo_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    # "foo  12": the maker's own tokenizer splits digits first, so that the two blanks stay together.
    assert tokenizer.encode("foo  12").ids == [15236, 256, 33, 34]
    assert tokenizer.encode("<|im_start|>user\nhi<|im_end|>").ids == [1, 4093, 198, 6004, 2]
    for text in PROBES:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_demo_models_tokenizer_as_we_do(demo_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(demo_folder)
    ours = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    for text in PROBES:
        assert theirs(text).input_ids == ours.encode(text).ids
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 2, 0)
    prompt = theirs.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_only_the_ids_in_the_file_end_a_text(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama"} | byte_level_vocabulary(259)
    write_gguf(tmp_path / "a.gguf", metadata, {})
    with GgufFile(tmp_path / "a.gguf") as file:
        assert generation_config(file) == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2}
    write_gguf(tmp_path / "b.gguf", metadata | {"tokenizer.ggml.eot_token_id": 7}, {})
    with GgufFile(tmp_path / "b.gguf") as file:
        assert generation_config(file)["eos_token_id"] == [2, 7]


def test_entries_that_only_fill_the_embedding_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = converted(tmp_path, byte_level_vocabulary(300))
    assert tokenizer.get_vocab_size() == 259
    assert tokenizer.id_to_token(280) is None


def test_merges_of_tokens_that_do_not_exist_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelBroken, match="merges"):
        converted(tmp_path, byte_level_vocabulary(300) | {"tokenizer.ggml.merges": ["xx yy"]})
    with pytest.raises(ModelBroken, match="merges"):
        converted(tmp_path, byte_level_vocabulary(300) | {"tokenizer.ggml.merges": ["noblank"]})
