"""Reads the files people have: ShareGPT JSON, JSONL of prompts or messages, traces of Mooncake, Azure and BurstGPT.

Each becomes a `Dataset` of sessions. A broken line is an error that names the file and the line; nothing is skipped
silently. Traces hold lengths and block hashes, not texts: the texts are made as they are needed (`PromptMaker`), so
that equal hashes are equal texts and the sharing of prefixes is kept. Pure but for reading the file. Floor 0.

Sources: ShareGPT `[{"conversations": [{"from": "human"|"gpt", "value": ...}]}]`; Mooncake trace README (timestamp in
ms, input_length, output_length, hash_ids of 512-token blocks); Azure LLM inference traces 2023 and 2024 (TIMESTAMP,
ContextTokens, GeneratedTokens); BurstGPT (Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type).
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError
from kvctl.workload.prompts import PromptMaker
from kvctl.workload.request_plan import Session, Turn

FORMATS = ("auto", "sharegpt", "jsonl", "mooncake", "azure", "burstgpt")
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace: lengths, and the hashes of its blocks where the trace tells them."""

    due_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int | str, ...] = ()

    def session(self, maker: PromptMaker) -> Session:
        """The request with a text of its own: equal hashes become equal blocks of text."""
        if not self.hash_ids:
            text = maker.prompt(self.input_tokens)
        else:
            parts, left = [], self.input_tokens
            for block_hash in self.hash_ids:
                if left <= 0:
                    break
                num_words = maker.rate.words_within(min(left, MOONCAKE_BLOCK_TOKENS))
                parts.append(maker.keyed(("block", block_hash), num_words))
                left -= MOONCAKE_BLOCK_TOKENS
            if left > 0:
                parts.append(maker.part(left))
            text = " ".join(parts)
        return Session((Turn(text, self.output_tokens, self.input_tokens),), due_s=self.due_s)


@dataclass(frozen=True)
class Dataset:
    """The requests of a file, in order of time where they have one (the first at 0)."""

    path: str
    file_format: str
    entries: Sequence[Session | TraceEntry]

    @property
    def is_timed(self) -> bool:
        """Whether the file says when each request is due."""
        return all(entry.due_s is not None for entry in self.entries)

    @property
    def num_requests(self) -> int:
        """Requests, counting every turn."""
        return sum(len(entry.turns) if isinstance(entry, Session) else 1 for entry in self.entries)

    def sessions(self, maker: PromptMaker) -> Iterator[Session]:
        """Yield the sessions once."""
        for entry in self.entries:
            yield entry if isinstance(entry, Session) else entry.session(maker)

    def sped_up(self, factor: float) -> "Dataset":
        """The same requests, due `factor` times as fast.

        Raises:
            ConfigError: the factor is not above 0.
        """
        if not factor > 0:
            raise ConfigError(f"a speed-up of {factor:g} stops time", hint="Give --speedup above 0.")
        entries = [e if e.due_s is None else replace(e, due_s=e.due_s / factor) for e in self.entries]
        return replace(self, entries=entries)


def load_dataset(
    path: Path, file_format: str = "auto", *, default_output_tokens: int = 128, max_entries: int | None = None
) -> Dataset:
    """Read a file.

    Raises:
        ConfigError: no such file, an unknown format, or a broken line (its number is in the message).
    """
    if file_format not in FORMATS:
        raise ConfigError(f"unknown dataset format {file_format!r}", hint=f"One of: {', '.join(FORMATS)}.")
    if file_format == "auto":
        file_format = detect_format(path)
    readers: dict[str, Callable[[], Iterator[Session | TraceEntry]]] = {
        "sharegpt": lambda: _sharegpt(path),
        "jsonl": lambda: _jsonl(path, default_output_tokens),
        "mooncake": lambda: _mooncake(path),
        "azure": lambda: _azure(path),
        "burstgpt": lambda: _burstgpt(path),
    }
    try:
        entries = list(islice(readers[file_format](), max_entries))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    if not entries:
        raise ConfigError(f"{path} holds no requests", hint=f"It was read as {file_format}; see --dataset-format.")
    return Dataset(str(path), file_format, _from_zero(entries))


def detect_format(path: Path) -> str:
    """Tell the format of a file from its beginning.

    Raises:
        ConfigError: not readable or of no known format.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            start = file.read(4096)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    first = start.lstrip().split("\n", 1)[0]
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        return "mooncake" if '"hash_ids"' in first or '"input_length"' in first else "jsonl"
    header = [name.strip().lower() for name in first.split(",")]
    if "contexttokens" in header:
        return "azure"
    if "request tokens" in header:
        return "burstgpt"
    if not first.strip():
        raise ConfigError(f"{path} is empty", hint="Give a file with at least one request.")
    raise ConfigError(f"{path} is of no known format", hint=f"Say which: --dataset-format {', '.join(FORMATS[1:])}.")


def _from_zero(entries: list[Session | TraceEntry]) -> list[Session | TraceEntry]:
    timed = [entry.due_s for entry in entries if entry.due_s is not None]
    if len(timed) < len(entries):
        return [replace(entry, due_s=None) if isinstance(entry, Session) else entry for entry in entries]
    first = min(timed)
    return sorted((replace(e, due_s=(e.due_s or 0.0) - first) for e in entries), key=lambda e: e.due_s or 0.0)


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield ('file:number', object) of a JSONL file."""
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line)
            except ValueError:
                raise ConfigError(f"{where} is not JSON: {line.strip()[:60]!r}") from None
            if not isinstance(value, dict):
                raise ConfigError(f"{where} is not an object: {line.strip()[:60]!r}")
            yield where, value


def _whole(value: object, name: str, where: str, *, least: int = 0) -> int:
    try:
        number = int(float(value))  # type: ignore[arg-type]  # what it cannot take is caught
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{where}: {name} is {value!r}, not a number") from None
    if number < least:
        raise ConfigError(f"{where}: {name} is {number}, below {least}")
    return number


def _sharegpt(path: Path) -> Iterator[Session]:
    try:
        conversations = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}{f':{line}' if line else ''} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise ConfigError(f"{path} is not a list of conversations")
    for number, entry in enumerate(conversations, 1):
        where = f"{path}: conversation {number}"
        parts = entry.get("conversations") if isinstance(entry, dict) else None
        if not isinstance(parts, list):
            raise ConfigError(f"{where} has no list 'conversations'")
        turns: list[Turn] = []
        asked: str | None = None
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("value"), str):
                raise ConfigError(f"{where} has a part without a text 'value'")
            if part.get("from") in ("human", "user"):
                asked = part["value"]
            elif part.get("from") in ("gpt", "assistant", "chatgpt") and asked:
                # About four characters a token: the answer's length without a tokenizer.
                turns.append(Turn(asked, max(4, min(2048, len(part["value"]) // 4))))
                asked = None
        if turns:
            yield Session((turns[0],))  # the first exchange, as is the custom for this file


def _jsonl(path: Path, default_output_tokens: int) -> Iterator[Session]:
    grouped: dict[str, list[Turn]] = {}
    due: dict[str, float | None] = {}
    for number, (where, value) in enumerate(_lines(path)):
        prompt, messages = value.get("prompt"), value.get("messages")
        if not isinstance(prompt, str) and not _are_messages(messages):
            raise ConfigError(f"{where} has neither a text 'prompt' nor a list 'messages'")
        limit = value.get("max_tokens", value.get("max_completion_tokens", value.get("output_tokens")))
        output = default_output_tokens if limit is None else _whole(limit, "max_tokens", where, least=1)
        turn = Turn(
            prompt if isinstance(prompt, str) else "", output, messages=None if isinstance(prompt, str) else messages
        )
        key = str(value.get("session", value.get("session_id", f"#{number}")))
        if key not in grouped:
            timestamp = value.get("timestamp")
            if timestamp is not None and not (isinstance(timestamp, int | float) and math.isfinite(timestamp)):
                raise ConfigError(f"{where}: timestamp is {timestamp!r}, not a number of seconds")
            due[key] = None if timestamp is None else float(timestamp)
        grouped.setdefault(key, []).append(turn)
    for key, turns in grouped.items():
        yield Session(tuple(turns), due_s=due[key])


def _are_messages(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _mooncake(path: Path) -> Iterator[TraceEntry]:
    for where, value in _lines(path):
        length = _whole(value.get("input_length"), "input_length", where, least=1)
        output = _whole(value.get("output_length"), "output_length", where, least=1)
        due_ms = _whole(value.get("timestamp", 0), "timestamp", where)
        hashes = value.get("hash_ids") or []
        if not isinstance(hashes, list) or not all(isinstance(h, int | str) for h in hashes):
            raise ConfigError(f"{where}: hash_ids is not a list of numbers")
        yield TraceEntry(due_ms / 1000, length, output, tuple(hashes))


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, dict[str, str]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        names = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
        missing = [column for column in columns if column not in names]
        if missing:
            raise ConfigError(f"{path}:1 has no column {missing[0]!r}", hint=f"Needed: {', '.join(columns)}.")
        for row in reader:
            yield f"{path}:{reader.line_num}", {column: (row[names[column]] or "").strip() for column in columns}


def _azure(path: Path) -> Iterator[TraceEntry]:
    for where, row in _rows(path, ("timestamp", "contexttokens", "generatedtokens")):
        text = row["timestamp"].replace("+00:00", "")
        head, _, fraction = text.partition(".")  # seven digits of a second, one more than datetime takes
        try:
            moment = datetime.fromisoformat(head)
            due_s = (moment - datetime(1970, 1, 1)).total_seconds() + (float(f"0.{fraction}") if fraction else 0.0)
        except (ValueError, TypeError):
            raise ConfigError(f"{where}: {row['timestamp']!r} is no time") from None
        yield _made(where, row["contexttokens"], row["generatedtokens"], due_s)


def _burstgpt(path: Path) -> Iterator[TraceEntry]:
    for where, row in _rows(path, ("timestamp", "request tokens", "response tokens")):
        try:
            due_s = float(row["timestamp"])
        except ValueError:
            due_s = math.nan
        if not math.isfinite(due_s):
            raise ConfigError(f"{where}: {row['timestamp']!r} is no time")
        if _whole(row["response tokens"], "response tokens", where) == 0:
            continue  # the trace's own mark of a request that failed
        yield _made(where, row["request tokens"], row["response tokens"], due_s)


def _made(where: str, input_text: str, output_text: str, due_s: float) -> TraceEntry:
    length, output = _whole(input_text, "input tokens", where), _whole(output_text, "output tokens", where)
    return TraceEntry(due_s, max(length, 1), max(output, 1))
