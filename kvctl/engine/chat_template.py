"""Chat templates: the Jinja program in a model folder that turns messages into a prompt.

Finds, compiles and renders it; what it may do is `template_sandbox`'s. Source of the rules: "Chat templates" in the
transformers documentation; `tests` compare every rendering with transformers' own. Knows no tokens. Floor 2, imports
no torch.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jinja2

from kvctl.engine.template_sandbox import WorkLimit, build_environment
from kvctl.errors import InvalidRequest, ModelBroken

# Stands after the words to continue while they are rendered. Its last space tells whether the template trims.
_CONTINUE_MARK: Final = "\ue000continue here\ue000 "


class ChatTemplate:
    """The template(s) of one model, compiled once. Most have one, named "default"; some a second for tools.

    Raises:
        InvalidRequest: a template that is no Jinja, or that cannot be compiled.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._limit = WorkLimit()
        environment = build_environment(self._limit)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(
                f"the chat template is not valid Jinja: {error.message} (line {error.lineno})", param="chat_template"
            ) from error
        except Exception as error:  # Python's compiler gives up in many ways: 21 loops in each other, 3,000 brackets
            raise InvalidRequest(
                f"the chat template cannot be compiled: {type(error).__name__}: {error}", param="chat_template"
            ) from error

    @classmethod
    def load(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> "ChatTemplate | None":
        """Find the template of a model folder: chat_template.jinja, chat_template.json or tokenizer_config.json.

        Raises:
            ModelBroken: there is one, and it is no Jinja.
        """
        sources = cls._find_sources(folder, tokenizer_config)
        if not sources:
            return None
        try:
            return cls(sources)
        except InvalidRequest as error:
            raise ModelBroken(
                f"{error.message}, in {folder}", hint="Repair it, or start serve with --chat-template FILE."
            ) from error

    @staticmethod
    def _find_sources(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
        sources: dict[str, str] = {}
        in_config: object = tokenizer_config.get("chat_template")
        legacy = folder / "chat_template.json"
        try:
            if in_config is None and legacy.is_file():
                in_config = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(in_config, str):
                sources["default"] = in_config
            elif isinstance(in_config, list):
                sources |= {entry["name"]: entry["template"] for entry in in_config}
            own_file = folder / "chat_template.jinja"
            if own_file.is_file():
                sources["default"] = own_file.read_text(encoding="utf-8")
            for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = extra.read_text(encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelBroken(
                f"the chat template in {folder} cannot be read: {error}", hint="Fetch the model again."
            ) from error
        return sources

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render `messages` as prompt text.

        With `continue_final_message` the text ends in the last message's words, so that the model goes on with them.

        Raises:
            InvalidRequest: the template refuses the messages (its own words are in the message) or cannot cope.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if continue_final_message:
            messages = _with_mark(messages)
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name) or next(iter(self._templates.values()))
        self._limit.start()
        try:
            text = template.render(
                **(dict(variables or {})),
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error.message or error}", param="messages"
            ) from error
        except Exception as error:  # a template is a program: on odd messages it can raise anything
            raise InvalidRequest(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


def _with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with the mark after the last one's words; they themselves stay as they are."""
    words = messages[-1].get("content") if messages else None
    marked: object = None
    if isinstance(words, str) and words.strip():
        marked = words + _CONTINUE_MARK
    elif isinstance(words, list):
        texts = [i for i, part in enumerate(words) if isinstance(part, Mapping) and part.get("type") == "text"]
        if texts:
            last = words[texts[-1]]
            marked = [*words[: texts[-1]], dict(last) | {"text": f"{last.get('text', '')}{_CONTINUE_MARK}"}]
    if marked is None:
        raise InvalidRequest("continue_final_message needs a last message with text", param="messages")
    return [*messages[:-1], dict(messages[-1]) | {"content": marked}]


def _cut_at_mark(text: str) -> str:
    """Cut the rendered text where the mark stands."""
    end = text.rfind(_CONTINUE_MARK.strip())
    if end < 0:
        raise InvalidRequest(
            "continue_final_message cannot be used: the chat template changes the last message's text",
            param="continue_final_message",
        )
    is_trimmed = not text.startswith(_CONTINUE_MARK, end)
    return text[:end].rstrip() if is_trimmed else text[:end]
