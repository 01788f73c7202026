"""Builds the events of a stream: chat and completions chunks from string templates.

Knows no transport. A chunk in mid-stream is one string concatenation and one JSON escape of the text; everything
rarer (logprobs, token ids, usage in every chunk, the first and the last chunk) takes the general way. Floor 3.
"""

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring as quote  # keeps UTF-8 as it is
from typing import Any, Final

from kvctl.engine.request_output import RequestOutput
from kvctl.server.logprobs import LogprobFormatter, TokenTexts

_MID_STREAM_END: Final = ',"logprobs":null,"finish_reason":null}]}\n\n'


@dataclass(frozen=True, slots=True)
class ResponseMeta:
    """What every chunk and every answer of one response repeats."""

    response_id: str
    created_s: int
    model: str
    n: int  # choices per prompt


@dataclass(frozen=True, slots=True)
class ChunkOptions:
    """What a client asked to see in each chunk."""

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    num_logprobs: int | None = None
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class PromptText:
    """One prompt of a response: its tokens, and its text where it is echoed."""

    token_ids: list[int]
    echo: str | None = None  # None: not echoed


def usage_object(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """The usage of one answer, with what the prefix cache saved."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ChunkBuilder:
    """The part that chat and completions share. `chunk()` is called once per delivery, in order."""

    OBJECT: str

    def __init__(
        self, meta: ResponseMeta, prompts: Sequence[PromptText], options: ChunkOptions, texts: TokenTexts
    ) -> None:
        self._prompts = prompts
        self._options = options
        self._n = meta.n
        self._head = (
            f'data: {{"id":{quote(meta.response_id)},"object":"{self.OBJECT}",'
            f'"created":{meta.created_s},"model":{quote(meta.model)},"choices":['
        )
        num_choices = meta.n * len(prompts)
        self._mid_stream_heads = [f'{self._head}{{"index":{i},{self._text_head()}' for i in range(num_choices)]
        self._mid_stream_end = self._text_end() + _MID_STREAM_END
        self._is_plain = not (options.continuous_usage or options.token_ids or options.num_logprobs is not None)
        self._started = [False] * num_choices
        self._num_output_tokens = [0] * num_choices
        self._num_cached_tokens = [0] * num_choices
        self._formatters = [
            LogprobFormatter(texts, num_top=options.num_logprobs or 0, as_ids=options.tokens_as_ids)
            for _ in range(num_choices if options.num_logprobs is not None else 0)
        ]

    @abstractmethod
    def _text_head(self) -> str:
        """JSON from the choice's index to the text."""

    @abstractmethod
    def _text_end(self) -> str:
        """JSON that closes what `_text_head` opened."""

    @abstractmethod
    def _first_text(self, choice: int, prompt: PromptText, output: RequestOutput) -> str:
        """JSON of a choice's first text, with what only the first chunk has."""

    @abstractmethod
    def _logprobs(self, formatter: LogprobFormatter, output: RequestOutput, *, is_first: bool) -> Any:
        """The logprobs of one delivery."""

    def chunk(self, prompt_index: int, output: RequestOutput) -> bytes:
        """One event for one delivery."""
        choice = prompt_index * self._n + output.index
        self._num_output_tokens[choice] += len(output.token_ids_delta)
        if self._is_plain and self._started[choice] and output.finish_reason is None:
            return f"{self._mid_stream_heads[choice]}{quote(output.text_delta)}{self._mid_stream_end}".encode()
        return self._full_chunk(prompt_index, choice, output)

    def _full_chunk(self, prompt_index: int, choice: int, output: RequestOutput) -> bytes:
        prompt = self._prompts[prompt_index]
        options = self._options
        is_first, self._started[choice] = not self._started[choice], True
        self._num_cached_tokens[choice] = output.num_cached_tokens
        if is_first:
            text = self._first_text(choice, prompt, output)
        else:
            text = f"{self._text_head()}{quote(output.text_delta)}{self._text_end()}"
        parts = [f'{self._head}{{"index":{choice},{text}']
        logprobs = self._logprobs(self._formatters[choice], output, is_first=is_first) if self._formatters else None
        finish = output.finish_reason.value if output.finish_reason is not None else None
        parts.append(f',"logprobs":{_json(logprobs)},"finish_reason":{_json(finish)}')
        if finish is not None:
            parts.append(f',"stop_reason":{_json(output.stop_reason)}')
        if options.token_ids:
            if is_first:
                parts.append(f',"prompt_token_ids":{_json(prompt.token_ids)}')
            parts.append(f',"token_ids":{_json(output.token_ids_delta)}')
        parts.append("}]")
        if options.continuous_usage:
            usage = usage_object(
                len(prompt.token_ids), self._num_output_tokens[choice], self._num_cached_tokens[choice]
            )
            parts.append(f',"usage":{_json(usage)}')
        parts.append("}\n\n")
        return "".join(parts).encode()

    def last(self) -> bytes:
        """The chunk with the usage of the whole response and no choice, where it was asked for."""
        if not self._options.include_usage:
            return b""
        usage = usage_object(
            sum(len(prompt.token_ids) for prompt in self._prompts),
            sum(self._num_output_tokens),
            sum(min(self._num_cached_tokens[i : i + self._n]) for i in range(0, len(self._num_cached_tokens), self._n)),
        )
        return f'{self._head}],"usage":{_json(usage)}}}\n\n'.encode()


class ChatChunks(ChunkBuilder):
    """chat.completion.chunk events; the role comes with a choice's first text."""

    OBJECT = "chat.completion.chunk"

    def __init__(
        self,
        meta: ResponseMeta,
        prompts: Sequence[PromptText],
        options: ChunkOptions,
        texts: TokenTexts,
        *,
        role: str,
    ) -> None:
        super().__init__(meta, prompts, options, texts)
        self._role = role

    def _text_head(self) -> str:
        return '"delta":{"content":'

    def _text_end(self) -> str:
        return "}"

    def _first_text(self, choice: int, prompt: PromptText, output: RequestOutput) -> str:
        text = (prompt.echo or "") + output.text_delta
        return f'"delta":{{"role":{quote(self._role)},"content":{quote(text)}}}'

    def _logprobs(self, formatter: LogprobFormatter, output: RequestOutput, *, is_first: bool) -> Any:
        return formatter.chat(output.logprobs_delta)


class CompletionChunks(ChunkBuilder):
    """text_completion events; an echoed prompt comes with a choice's first text."""

    OBJECT = "text_completion"

    def _text_head(self) -> str:
        return '"text":'

    def _text_end(self) -> str:
        return ""

    def _first_text(self, choice: int, prompt: PromptText, output: RequestOutput) -> str:
        return f'"text":{quote((prompt.echo or "") + output.text_delta)}'

    def _logprobs(self, formatter: LogprobFormatter, output: RequestOutput, *, is_first: bool) -> Any:
        token_ids, positions = output.token_ids_delta, list(output.logprobs_delta)
        if is_first and output.prompt_logprobs is not None:
            return formatter.completion(output.prompt_token_ids + token_ids, [*output.prompt_logprobs, *positions])
        return formatter.completion(token_ids, positions)
