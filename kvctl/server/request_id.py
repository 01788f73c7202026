"""X-Request-Id on every response, where the operator asked for it. Floor 3."""

import re
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME: Final = b"x-request-id"
_HARMLESS: Final = re.compile(rb"[\x21-\x7e]{1,256}\Z")  # what may be repeated in a header and in a log


class RequestIdHeader:
    """ASGI application that answers with the client's X-Request-Id, or with one of its own making.

    The one it makes is put into the request too, so that the answer's id is built from it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the header to the request, if it has none, and to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == NAME), b"")
        request_id = given if _HARMLESS.match(given) else uuid.uuid4().hex.encode()
        headers = [(name, value) for name, value in scope["headers"] if name != NAME] + [(NAME, request_id)]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (NAME, request_id)]
            await send(message)

        await self._app({**scope, "headers": headers}, receive, send_with_id)
