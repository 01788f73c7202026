"""The exceptions of kvctl, with the exit code and the HTTP status that each one means.

Knows nothing of commands or servers: `cli` and `server` read the class attributes. Floor 0.

    KvctlError                 exit 1   HTTP 500   an expected failure, told in two lines
    |- ConfigError             exit 2   HTTP 500   an option or file says something impossible
    |- InvalidRequest          exit 1   HTTP 400   the caller's input cannot be served
    |  |- ModelNotFound        exit 1   HTTP 404   no such model here
    |  |- FeatureNotServed     exit 1   HTTP 501   a known field that this engine cannot honour
    |- ModelNotSupported       exit 3   HTTP 501   this architecture is not known here
    |- ModelBroken             exit 1   HTTP 500   a file of the model is missing or damaged
    |- OutOfMemory             exit 4   HTTP 500   it does not fit
    |- QueueFull               exit 1   HTTP 503   too many requests wait; try again later
    |- ServerUnreachable       exit 1   HTTP 502   a server does not answer
    |- EngineDead              exit 1   HTTP 503   the engine process has ended
    |- InvariantViolation      exit 1   HTTP 500   a bug of ours, found by check_integrity()
"""

from typing import ClassVar


class KvctlError(Exception):
    """What happened (with the value), and as `hint` what to do about it: two lines at most."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    http_type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


class ConfigError(KvctlError):
    """An option, a file or a combination of them says something impossible."""

    exit_code = 2


class InvalidRequest(KvctlError):
    """The caller's input cannot be served; `param` names the field at fault."""

    http_status = 400
    http_type = "BadRequestError"

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ModelNotFound(InvalidRequest):
    """No model of that name here."""

    http_status = 404
    http_type = "NotFoundError"


class FeatureNotServed(InvalidRequest):
    """A field that clients know and that would change the answer, but that this engine cannot honour."""

    http_status = 501
    http_type = "NotImplementedError"


class ModelNotSupported(KvctlError):
    """The architecture or a feature of it is not known here."""

    exit_code = 3
    http_status = 501
    http_type = "NotImplementedError"


class ModelBroken(KvctlError):
    """A file of the model is missing, damaged or contradicts another."""


class OutOfMemory(KvctlError):
    """What was asked for does not fit the memory there is."""

    exit_code = 4


class QueueFull(KvctlError):
    """Too many requests wait already; the client should come back after `retry_after_s`."""

    http_status = 503
    http_type = "ServiceUnavailableError"

    def __init__(self, message: str, *, hint: str | None = None, retry_after_s: int = 1) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class ServerUnreachable(KvctlError):
    """A server that was asked does not answer, or not as such a server should."""

    http_status = 502


class EngineDead(KvctlError):
    """The engine process has ended; nothing more can be generated."""

    http_status = 503
    http_type = "ServiceUnavailableError"


class InvariantViolation(KvctlError):
    """The block pool or a cache contradicts itself: a bug of ours, never the user's input."""
