"""Builds request bodies: the fixed options once, the prompt of each turn in as few steps as possible.

Knows the two OpenAI endpoints; knows nothing of connections or of where prompts come from. Floor 3.
"""

import json
from collections.abc import Sequence

from kvctl.bench.run_config import RequestConfig
from kvctl.workload.request_plan import Turn


class BodyBuilder:
    """Bodies of one run."""

    def __init__(self, config: RequestConfig) -> None:
        self._is_chat = config.endpoint == "chat"
        self._head = json.dumps(config.options(), separators=(",", ":"))[:-1]
        self._limit_name = config.limit_field

    def build(self, turn: Turn, history: Sequence[tuple[str, str]] = ()) -> bytes:
        """The body of a turn. `history`: (user, assistant) texts of the turns before it."""
        if self._is_chat:
            messages = turn.messages
            if messages is None:
                messages = [{"role": "system", "content": turn.system}] if turn.system else []
                for user, assistant in history:
                    messages.append({"role": "user", "content": user})
                    messages.append({"role": "assistant", "content": assistant})
                messages.append({"role": "user", "content": turn.text})
            prompt = '"messages":' + json.dumps(messages)
        else:
            text = turn.text
            if turn.messages is not None:
                text = "\n".join(str(message.get("content", "")) for message in turn.messages)
            parts = [turn.system] if turn.system else []
            parts += [user + assistant for user, assistant in history]  # as generated: so it is in the server's cache
            prompt = '"prompt":' + json.dumps(" ".join([*parts, text]) if parts else text)
        limit = f',"{self._limit_name}":{turn.output_tokens}' if turn.output_tokens > 0 else ""
        return f"{self._head}{limit},{prompt}}}".encode()
