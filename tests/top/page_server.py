"""A small HTTP server that answers as a test wants: good pages, endless ones, none. For tests only."""

import contextlib
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


def page(text: str | Callable[[], str], status: int = 200) -> Answer:
    """An ordinary answer."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        body = (text if isinstance(text, str) else text()).encode()
        request.send_response(status)
        request.send_header("Content-Type", "text/plain; version=0.0.4")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    return answer


class PageServer:
    """Serves `answers` by path on a loopback port and keeps what it was asked."""

    def __init__(self, answers: dict[str, Answer]) -> None:
        self.asked: list[tuple[str, str, dict[str, str]]] = []
        self.num_connections = 0
        self.is_closing = threading.Event()
        self._sockets: list[socket.socket] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.num_connections += 1
                outer._sockets.append(self.request)
                super().setup()

            def do_GET(self) -> None:
                self.is_closing = outer.is_closing
                outer.asked.append((self.command, self.path, dict(self.headers)))
                try:
                    answers.get(self.path, page("not here", 404))(self)
                except OSError:
                    self.close_connection = True  # the client has left

            do_POST = do_PUT = do_DELETE = do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_arguments: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # closing waits for every answer, so that no socket is left open
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "PageServer":
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.is_closing.set()
        self._server.shutdown()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # a kept connection would hold its thread
        self._server.server_close()
        self._thread.join()
