"""Text to token ids and back, and chat messages to a prompt: what a model folder's tokenizer files say.

Reads `tokenizer.json` with the `tokenizers` package alone: importing transformers costs two seconds, more than all
the rest of a start. Only a folder without that file goes through transformers. Knows no HTTP and no sampling.
Whatever a caller's text does to it is an InvalidRequest. Floor 2, imports no torch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from kvctl.engine.chat_template import ChatTemplate
from kvctl.engine.json_file import read_json_object
from kvctl.errors import InvalidRequest, KvctlError, ModelBroken

Message = Mapping[str, Any]


def is_tokenizer_error(error: BaseException) -> bool:
    """Whether it may come out of the tokenizers package: a bare Exception, or a panic, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def _named(name: Callable[[BaseException], KvctlError]) -> Iterator[None]:
    """Say by a name of ours what the tokenizers package fails with."""
    try:
        yield
    except BaseException as error:
        if not is_tokenizer_error(error):
            raise
        raise name(error) from error


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        with _named(lambda error: ModelBroken(f"{path} cannot be read: {error}", hint="Fetch the model again.")):
            return tokenizers.Tokenizer.from_file(str(path))
    if not folder.is_dir():
        raise ModelBroken(f"there is no model folder {folder}", hint="Give a folder, a hub id or a .gguf file.")
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ModelBroken(
            f"{folder} has no tokenizer.json, and transformers cannot make one: {first_line}",
            hint="Fetch the tokenizer files of the model.",
        ) from error
    backend = getattr(slow, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelBroken(
            f"the tokenizer in {folder} ({type(slow).__name__}) has no fast form",
            hint="Save it once with transformers' save_pretrained() to get a tokenizer.json.",
        )
    return backend


def _content(token: object) -> str | None:
    """Special tokens are written as a string or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the tokens that only tokenizer_config.json knows, where they land on the ids it says."""
    decoder = config.get("added_tokens_decoder")
    if not isinstance(decoder, Mapping):
        return
    for token_id, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        content = _content(entry)
        if content and backend.token_to_id(content) is None and int(token_id) == backend.get_vocab_size():
            flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
            normalized = bool(entry.get("normalized", not flags["special"]))
            backend.add_tokens([tokenizers.AddedToken(content, normalized=normalized, **flags)])


class Tokenizer:
    """A model's tokenizer. Build it with `Tokenizer.load(folder)`."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        config = config or {}
        backend.no_truncation()  # a file may have been saved with the limits of somebody's training run
        backend.no_padding()
        _add_configured_tokens(backend, config)
        self.backend = backend
        self.chat_template = chat_template
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.bos_token_id = backend.token_to_id(self.bos_token) if self.bos_token else None
        self.eos_token_id = backend.token_to_id(self.eos_token) if self.eos_token else None
        self.special_tokens = {
            name: text for name, token in config.items() if name.endswith("_token") and (text := _content(token))
        }
        self._forced_bos = self._decide_bos(config.get("add_bos_token"))
        self.token_text = lru_cache(maxsize=1 << 16)(self._token_text)

    @classmethod
    def load(cls, folder: Path, *, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a model folder; `chat_template` (Jinja text) replaces the folder's own.

        Raises:
            ModelBroken: a file is missing or cannot be read; the message names it.
        """
        config = read_json_object(folder / "tokenizer_config.json", missing_ok=True)
        if "bos_token" not in config and "eos_token" not in config:
            config = read_json_object(folder / "special_tokens_map.json", missing_ok=True) | config
        template = (
            ChatTemplate.load(folder, config) if chat_template is None else ChatTemplate({"default": chat_template})
        )
        backend = _load_backend(folder)
        wrong = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder or a special token is not as it should be"
        with _named(lambda error: ModelBroken(f"{wrong}: {error}", hint="Fetch the model again.")):
            return cls(backend, config=config, chat_template=template)

    # ---- text and ids ----

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn text into token ids; `add_special_tokens` adds what the model wants around a prompt (a BOS).

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which no UTF-8 has, or the tokenizer fails on it.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text is not valid Unicode: a lone surrogate \\u{ord(text[error.start]):04x} at character "
                f"{error.start}",
                param="prompt",
            ) from None
        with _named(lambda error: InvalidRequest(f"the model's tokenizer fails on this text: {error}", param="prompt")):
            # the only way of the package that lets other threads run meanwhile
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        if add_special_tokens and self._forced_bos is not None:
            starts_with_bos = bool(ids) and ids[0] == self.bos_token_id
            if self._forced_bos and not starts_with_bos and self.bos_token_id is not None:
                return [self.bos_token_id, *ids]
            if not self._forced_bos and starts_with_bos:
                return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text. Ids that no token has give nothing.

        Raises:
            InvalidRequest: the tokenizer fails on them.
        """
        with _named(
            lambda error: InvalidRequest(f"the model's tokenizer fails on these tokens: {error}", param="tokens")
        ):
            texts: list[str] = self.backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return texts[0]

    def _token_text(self, token_id: int) -> str:
        """Return the text of one token, as in the middle of a sentence (cached as `token_text`)."""
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return ""
        text = self.decode([token_id], skip_special_tokens=False)
        if piece.startswith("▁") and not text.startswith(" "):  # sentencepiece drops the space of a first word
            return " " + text
        return text

    # ---- chat ----

    def apply_chat_template(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as the prompt text; encode it with `add_special_tokens=False`.

        `variables` reach the template beside the special tokens (`bos_token` and so on).

        Raises:
            InvalidRequest: no template, or the template refuses these messages.
        """
        template = ChatTemplate({"default": chat_template}) if chat_template is not None else self.chat_template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template",
                hint="Use /v1/completions, or start serve with --chat-template FILE.",
            )
        return template.render(
            list(messages),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=self.special_tokens | dict(variables or {}),
        )

    # ---- internals ----

    def _decide_bos(self, configured: object) -> bool | None:
        """Whether `add_bos_token` of the configuration asks for something else than tokenizer.json does."""
        if not isinstance(configured, bool) or self.bos_token_id is None:
            return None
        ids = self.backend.encode("a", add_special_tokens=True).ids
        return None if (ids[:1] == [self.bos_token_id]) == configured else configured
