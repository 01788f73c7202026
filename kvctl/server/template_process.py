"""Renders a client's own chat template in a process of its own, with limits of time and memory.

For --trust-request-chat-template alone: the model's template is rendered in place, a hundred times faster. Knows no
request. Floor 3.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from typing import Any, Final

from kvctl.errors import InvalidRequest

MAX_AT_ONCE: Final = 2  # processes; more wait
LIMIT_S: Final = 10.0  # by the clock
_COMMAND: Final = (sys.executable, "-P", "-m", "kvctl.engine.template_child")


class TemplateProcess:
    """One per server: bounds how many templates are rendered at once."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def render(self, template: str, arguments: dict[str, Any]) -> str:
        """Render `template` with the arguments of `ChatTemplate.render`.

        Raises:
            InvalidRequest: it is no Jinja, refuses the messages, or takes too much time or memory.
        """
        asked = json.dumps({"template": template, **arguments}).encode()
        async with self._places:
            answer = await self._run(asked)
        if "text" in answer:
            return str(answer["text"])
        raise InvalidRequest(answer["refused"], param="chat_template")

    async def _run(self, asked: bytes) -> dict[str, str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
        process = await asyncio.create_subprocess_exec(
            *_COMMAND, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
        )
        try:
            async with asyncio.timeout(LIMIT_S):
                written, _ = await process.communicate(asked)
            answer: dict[str, str] = json.loads(written)
        except (TimeoutError, ValueError):  # ended from outside: nothing was written, or not all
            return {"refused": "the chat template takes too much time or memory"}
        else:
            return answer
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
