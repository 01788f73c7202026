"""A tokenizer of 256 bytes and three special tokens, made here: any text, one token per byte, no download."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from kvctl.engine.tokenizer import Tokenizer

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
VOCAB_SIZE = 259
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}


def build_backend() -> tokenizers.Tokenizer:
    """Token id = byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
    assert set(vocab) == set(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    assert backend.get_vocab_size() == VOCAB_SIZE
    return backend


def build_tokenizer() -> Tokenizer:
    """The same as `kvctl.engine`'s tokenizer, with a small chat template."""
    from kvctl.engine.chat_template import ChatTemplate

    return Tokenizer(build_backend(), config=CONFIG, chat_template=ChatTemplate({"default": CHAT_TEMPLATE}))


def save_tokenizer(folder: Path) -> None:
    """Write the files of a model folder."""
    build_backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
