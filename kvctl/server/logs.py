"""Logging of the server process: one format, one stream (stderr), no line per polled endpoint. Floor 3."""

import logging
import sys
from collections.abc import Sequence
from typing import Final

FORMAT: Final = "%(levelname)s %(asctime)s %(message)s"
DATE_FORMAT: Final = "%m-%d %H:%M:%S"
# uvicorn's remarks about clients' broken requests: each is answered, none is worth a line
_CHATTER: Final = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library")


class _QuietPaths(logging.Filter):
    """Drops access log lines of paths that something polls."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self._paths = frozenset(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is worth printing; arguments are (client, method, path, version, status)."""
        arguments = record.args
        if not isinstance(arguments, tuple) or len(arguments) < 3:
            return True
        return str(arguments[2]).partition("?")[0] not in self._paths


class _NoChatter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(_CHATTER)


def configure_logging(*, level: str, server_level: str, access_log: bool, quiet_paths: Sequence[str]) -> None:
    """Send our log and uvicorn's to stderr. Called once, by `launch`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    for name, at_level in (("kvctl", level), ("uvicorn", server_level)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(at_level.upper() if at_level != "trace" else 5)
        logger.propagate = False
    # uvicorn's own milestones say less than ours
    errors = logging.getLogger("uvicorn.error")
    errors.setLevel(max(logging.WARNING, logging.getLogger("uvicorn").level))
    errors.addFilter(_NoChatter())
    access = logging.getLogger("uvicorn.access")
    access.addFilter(_QuietPaths(quiet_paths))
    if not access_log:
        access.handlers[:] = []
        access.propagate = False
