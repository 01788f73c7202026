"""From GGUF metadata to the tokenizer files of a Hugging Face folder.

Two kinds of vocabulary: byte-level BPE with a list of merges ("gpt2"), and SentencePiece BPE, where the scores order
the merges ("llama"). How text is split before the merges is only named in the file (`tokenizer.ggml.pre`); a name that
is not known here is refused, because a near miss would give other tokens without any error. Floor 2.

Source of the split patterns: the tokenizer.json files that the models' makers publish (read 2026-11).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvctl.engine.gguf_file import GgufFile
from kvctl.errors import ModelBroken, ModelNotSupported

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Token types of the format.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_SPACE: Final = "\u2581"  # SentencePiece's mark for a blank

_LLAMA3_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT: Final = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Final = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_WHOLE_WORDS_FIRST: Final = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word that is a token needs no merges
_BOS_BY_DEFAULT: Final = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_GPT2_KINDS: Final = {"gpt-2", "default", "smollm"}
# Files older than `tokenizer.ggml.pre`.
_PRE_OF_ARCHITECTURE: Final = {"qwen2": "qwen2", "qwen3": "qwen2"}
# Some files name only the end of the text as `eos`; a chat template that writes one of these ends turns with it.
_ENDS_OF_TURN: Final = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


def write_tokenizer(file: GgufFile, folder: Path, *, max_length: int) -> int | list[int] | None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and, if there is one, chat_template.jinja.

    Returns the ids that end a text, as config.json and generation_config.json have them.

    Raises:
        ModelNotSupported: a kind of tokenizer that is not known here.
        ModelBroken: the vocabulary is missing or contradicts itself.
    """
    vocabulary = _Vocabulary(file)
    tokenizer = _build(file, vocabulary)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")  # its own save() hides a full disk
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.add_bos,
        "add_eos_token": vocabulary.add_eos,
    }
    for name in ("bos", "eos", "unk", "pad"):
        token = vocabulary.special(name)
        if token is not None:
            config[f"{name}_token"] = token
    _write_json(folder / "tokenizer_config.json", config)
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template.strip():
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    generation = generation_config(file)
    _write_json(folder / "generation_config.json", generation)
    ends: int | list[int] | None = generation.get("eos_token_id")
    return ends


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the ids that begin, pad and end a text: what the file says, and its chat template's end of turn."""
    metadata = file.metadata
    ends = [
        metadata[key]
        for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        if isinstance(metadata.get(key), int)
    ]
    template = metadata.get("tokenizer.chat_template") or ""
    ids = {token: i for i, token in enumerate(metadata.get("tokenizer.ggml.tokens", ()))}
    ends += [ids[token] for token in _ENDS_OF_TURN if token in template and token in ids]
    ends = list(dict.fromkeys(ends))
    result: dict[str, Any] = {}
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if isinstance(metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            result[name] = metadata[f"tokenizer.ggml.{key}_token_id"]
    if ends:
        result["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return result


class _Vocabulary:
    """Tokens, their types and the special ones; checked against each other."""

    def __init__(self, file: GgufFile) -> None:
        metadata = file.metadata
        self.path = file.path
        self.kind = metadata.get("tokenizer.ggml.model")
        self.tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
        self.types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(self.tokens)
        self.pre = str(
            metadata.get("tokenizer.ggml.pre")
            or _PRE_OF_ARCHITECTURE.get(str(metadata.get("general.architecture")), "default")
        )
        if not self.tokens or len(self.types) != len(self.tokens) or not all(isinstance(t, str) for t in self.tokens):
            raise ModelBroken(
                f"{file.path}: {len(self.tokens):,} tokens and {len(self.types):,} token types",
                hint="Fetch the file again, or convert the model again.",
            )
        self._special = {
            name: metadata.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        bos_by_default = self.kind == "llama" or self.pre in _BOS_BY_DEFAULT
        self.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", bos_by_default))
        self.add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
        self.add_space_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))

    def special(self, name: str) -> str | None:
        """Return the text of 'bos', 'eos', 'unk' or 'pad'."""
        index = self._special[name]
        if not isinstance(index, int):
            return None
        if not 0 <= index < len(self.tokens):
            raise ModelBroken(
                f"{self.path}: the {name} token is {index}, but there are {len(self.tokens):,} tokens",
                hint="Fetch the file again, or convert the model again.",
            )
        return self.tokens[index]

    def ids(self) -> dict[str, int]:
        """Return token -> id, without the padding entries that only fill the embedding's rows."""
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if kind != _UNUSED:
                ids.setdefault(token, index)
        return ids


def _build(file: GgufFile, vocabulary: _Vocabulary) -> "Tokenizer":
    if vocabulary.kind == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif vocabulary.kind == "llama":
        tokenizer = _sentencepiece(file, vocabulary)
    else:
        raise ModelNotSupported(
            f"{file.path} has a tokenizer of the kind {vocabulary.kind!r}",
            hint="Supported: gpt2 (byte-level BPE) and llama (SentencePiece BPE).",
        )
    return tokenizer


def _byte_level(file: GgufFile, vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges") or ()]
    pre = vocabulary.pre
    if pre not in _SPLITS and pre not in _GPT2_KINDS:
        raise ModelNotSupported(
            f"{file.path} splits text by the rule {pre!r}, which is not known here",
            hint=f"Known: {', '.join(sorted({*_SPLITS, *_GPT2_KINDS}))}. Use the original Hugging Face folder.",
        )
    try:
        model = models.BPE(
            vocab=vocabulary.ids(), merges=merges, ignore_merges=pre in _WHOLE_WORDS_FIRST, fuse_unk=False
        )
    except Exception as error:  # tokenizers raises plain Exception: a merge of a token that does not exist
        raise ModelBroken(f"{file.path}: its merges contradict its vocabulary ({error})") from None
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in _GPT2_KINDS)
    if pre == "smollm":  # every digit is a word of its own
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if _SPLITS.get(pre) == _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trim = processors.ByteLevel(trim_offsets=False)
    template = _template(vocabulary)
    tokenizer.post_processor = processors.Sequence([trim, template]) if template else trim
    _add_special_tokens(tokenizer, vocabulary, normalized=False)
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: _Vocabulary) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(vocabulary.tokens):
        raise ModelBroken(
            f"{file.path}: {len(vocabulary.tokens):,} tokens, but {len(scores):,} scores",
            hint="Fetch the file again, or convert the model again.",
        )
    # llama.cpp's converter writes blanks into user-defined tokens; the text they are looked up in has marks.
    vocabulary.tokens = [
        token.replace(" ", _SPACE) if kind == _USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
    ]
    ids = vocabulary.ids()
    mergeable = [i for i, kind in enumerate(vocabulary.types) if kind == 1]
    model = models.BPE(
        vocab=ids,
        merges=list(_merges_by_score(vocabulary.tokens, scores, mergeable)),
        unk_token=vocabulary.special("unk"),
        fuse_unk=True,
        byte_fallback=True,
        ignore_merges=False,
    )
    tokenizer = Tokenizer(model)
    marks = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marks])
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = marks
    tokenizer.decoder = decoders.Sequence(steps)
    template = _template(vocabulary)
    if template is not None:
        tokenizer.post_processor = template
    _add_special_tokens(tokenizer, vocabulary, normalized=True)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float], mergeable: Iterable[int]) -> Iterable[tuple[str, str]]:
    """Yield the pairs that make up each token, best score first.

    SentencePiece joins at each moment the neighbours whose joined token has the best score; a list of merges in that
    order says the same. O(total length of the tokens).
    """
    normal = set(mergeable)
    known = {tokens[i] for i in normal}
    # Python's sort is stable: equal scores stay in the order of their ids.
    for index in sorted(normal, key=lambda i: -scores[i]):
        token = tokens[index]
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


def _template(vocabulary: _Vocabulary) -> Any | None:
    from tokenizers import processors

    bos = vocabulary.special("bos") if vocabulary.add_bos else None
    eos = vocabulary.special("eos") if vocabulary.add_eos else None
    if bos is None and eos is None:
        return None
    single = [part for part in (bos, "$A", eos) if part is not None]
    ids = vocabulary.ids()
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{part}:1" if part != "$A" else "$B:1" for part in single)],
        special_tokens=[(token, ids[token]) for token in (bos, eos) if token is not None],
    )


def _add_special_tokens(tokenizer: "Tokenizer", vocabulary: _Vocabulary, *, normalized: bool) -> None:
    """Mark control tokens (never typed by a user) and user-defined ones (found in the text before any merge)."""
    from tokenizers import AddedToken

    control, user_defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            control.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            user_defined.append(AddedToken(token, special=False, normalized=normalized))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)
