import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from kvctl.engine.tokenizer import Tokenizer
from kvctl.errors import InvalidRequest, ModelBroken
from tests.support import byte_tokenizer, fakes

BYTES = byte_tokenizer.build_tokenizer()


@pytest.fixture(scope="module")
def demo(demo_folder):
    theirs = AutoTokenizer.from_pretrained(demo_folder, local_files_only=True)
    return Tokenizer.load(demo_folder), theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_tokenizer.save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.load(folder)


def write(folder, backend, **config):
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
def test_text_comes_back_as_it_went(text):
    assert BYTES.decode(BYTES.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "foo  12", "The capital of France is", "naïve 你好 🎉", "a\u0000b", "xy" * 40),
        *("<|im_start|>user\nhi<|im_end|>", "tabs\t\tand\r\nlines", "1234567890", "\u202eright to left"),
    ],
)
def test_the_demo_models_ids_are_those_of_transformers(demo, text):
    ours, theirs = demo
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
            ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
        )
    assert ours.backend.get_vocab_size() == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


def test_loading_imports_no_transformers(folder):
    code = (
        "import sys; from pathlib import Path; from kvctl.engine.tokenizer import Tokenizer\n"
        f"Tokenizer.load(Path({str(folder)!r})).encode('x')\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("text", ["\ud800", "ok \udcff", "\udc00\ud800"])
def test_half_a_surrogate_pair_is_the_callers_fault(tokenizer, text):
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode(text)


def test_a_text_that_the_tokenizer_fails_on_is_the_callers_fault():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0}))  # raises for what is no word: it has no token for that
    with pytest.raises(InvalidRequest, match="UNK") as caught:
        Tokenizer(words).encode("b")
    assert caught.value.param == "prompt"
    slow = tokenizers.Tokenizer(models.BPE({"a": 0}, []))  # panics, which is no Exception, after 10 million steps
    slow.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    with pytest.raises(InvalidRequest, match="retry-limit"):
        Tokenizer(slow).encode("a" * 28 + "b")
    with pytest.raises(InvalidRequest, match="too large"):
        Tokenizer(slow).decode([2**40])


def test_a_tokenizer_that_cannot_encode_is_named_at_the_start(tmp_path):
    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0}))
    with pytest.raises(ModelBroken, match="UNK"):
        Tokenizer.load(write(tmp_path, words, bos_token="<s>", add_bos_token=True))


def test_a_bos_is_added_where_the_model_wants_one(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, fakes.sentencepiece_like_backend(), bos_token="<s>"))
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_add_bos_token_of_the_configuration_wins_over_tokenizer_json(tmp_path, wanted, in_file):
    backend = byte_tokenizer.build_backend()
    if in_file:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "add_bos_token": wanted}
    tokenizer = Tokenizer.load(write(tmp_path, backend, **config))
    assert tokenizer.encode("a") == ([256, 97] if wanted else [97])
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_limits_of_somebodys_training_run_are_dropped(tmp_path):
    backend = byte_tokenizer.build_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.encode("123456789") == list(b"123456789")


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path):
    entry = {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"added_tokens_decoder": {str(byte_tokenizer.VOCAB_SIZE): entry, "9999": entry | {"content": "<far>"}}}
    tokenizer = Tokenizer.load(write(tmp_path, byte_tokenizer.build_backend(), **config))
    assert tokenizer.encode("<extra>") == [byte_tokenizer.VOCAB_SIZE]
    assert tokenizer.backend.get_vocab_size() == byte_tokenizer.VOCAB_SIZE + 1
    assert tokenizer.backend.get_added_tokens_decoder()[byte_tokenizer.VOCAB_SIZE].special


def test_a_tokens_own_text_keeps_its_leading_space(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, fakes.sentencepiece_like_backend()))
    backend = tokenizer.backend
    assert tokenizer.token_text(backend.token_to_id("▁hello")) == " hello"
    assert tokenizer.token_text(backend.token_to_id("hello")) == "hello"
    assert tokenizer.token_text(2) == "</s>"
    assert tokenizer.token_text(1_000_000) == ""


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    backend = byte_tokenizer.build_backend()
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer = Tokenizer.load(write(tmp_path, backend))
    assert tokenizer.decode([259], skip_special_tokens=True) == "<tool>"
    assert tokenizer.decode([257], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("chat_template.jinja", "{% if %}", "not valid Jinja"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat template"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}', "added_tokens_decoder"),
    ],
)
def test_a_damaged_file_is_named(folder, tmp_path, name, content, words):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / name).write_text(content)
    with pytest.raises(ModelBroken, match=words) as caught:
        Tokenizer.load(broken)
    assert str(broken) in caught.value.message
    assert caught.value.hint


def test_a_folder_without_any_tokenizer_says_so(tmp_path):
    with pytest.raises(ModelBroken, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelBroken, match="no model folder"):
        Tokenizer.load(tmp_path / "nothing")


def test_without_a_template_chat_is_refused_with_advice():
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        Tokenizer(byte_tokenizer.build_backend()).apply_chat_template([{"role": "user", "content": "hi"}])
    assert "--chat-template" in caught.value.hint


def test_special_tokens_are_variables_of_the_template(folder):
    tokenizer = Tokenizer.load(
        folder, chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ extra }}"
    )
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], variables={"extra": 7})
    assert text == "<s>hi</s>7"


def test_other_threads_run_while_a_long_text_is_tokenized_and_put_together_again():
    """In a server they send everybody else's tokens."""
    tokenizer = BYTES
    text = "The quick brown fox jumps over the lazy dog. " * 20_000

    def turns_while(work, *arguments):
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work, *arguments)
            turns = 0
            while not working.done():
                time.sleep(0.0005)
                turns += 1
        return turns, working.result()

    turns, ids = turns_while(tokenizer.encode, text)
    assert turns > 20
    turns, again = turns_while(tokenizer.decode, ids)
    assert turns > 5 and again == text
