"""What crosses between the API process and the engine process, as msgpack frames on one Unix socket pair.

Knows nothing of asyncio, of the core loop or of HTTP. A frame is 4 bytes of length (little endian) and one
message: a tagged array. Only plain types cross: those of `core/step.py`, `SamplingParams`, `EngineConfig` and
`EngineInfo`. An error crosses as the name of its class with message and hint, and is raised as that class again.

A socket pair and no broker: it has no name that another process could reach or that a killed process leaves
behind, and either side sees the end of the other as end-of-file at once. Floor 2, imports no torch.
"""

from typing import Final

import msgspec

from kvctl import errors
from kvctl.core.request import Request
from kvctl.core.sampling_params import SamplingParams
from kvctl.core.step import StepResult
from kvctl.engine.config import EngineConfig, EngineInfo
from kvctl.errors import InvalidRequest, KvctlError

FRAME_HEADER_BYTES: Final = 4


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages: encoded as [class name, fields...]."""


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A `KvctlError` on its way to the other process."""

    class_name: str
    message: str
    hint: str | None = None
    param: str | None = None

    @classmethod
    def of(cls, error: KvctlError) -> "WireError":
        """Take an error apart."""
        param = error.param if isinstance(error, InvalidRequest) else None
        return cls(type(error).__name__, error.message, error.hint, param)

    def to_exception(self) -> KvctlError:
        """Build the same class again; an unknown class becomes a plain `KvctlError`."""
        kind = getattr(errors, self.class_name, KvctlError)
        if not (isinstance(kind, type) and issubclass(kind, KvctlError)):
            kind = KvctlError
        error: KvctlError = kind(self.message, hint=self.hint)
        if isinstance(error, InvalidRequest):
            error.param = self.param
        return error


# ---- to the engine ----


class StartEngine(_Message, frozen=True):
    """The first message: what to build."""

    config: EngineConfig


class EngineRequest(_Message, frozen=True):
    """One request for the core. `arrival_s` is monotonic time, the same clock in all processes of a machine."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    eos_token_ids: frozenset[int] = frozenset()

    def to_request(self) -> Request:
        """Build the core's own object."""
        return Request(
            self.request_id,
            self.prompt_token_ids,
            self.sampling_params,
            self.arrival_s,
            self.priority,
            self.cache_salt,
            eos_token_ids=self.eos_token_ids,
        )


class AbortRequests(_Message, frozen=True):
    """Free these requests' blocks now; unknown and finished ids are ignored."""

    request_ids: list[str]


class StopEngine(_Message, frozen=True):
    """End the process: nobody waits for output any more."""


# ---- from the engine ----


class ReportLine(_Message, frozen=True):
    """A line for the log while the engine starts."""

    line: str


class EngineReady(_Message, frozen=True):
    """The engine takes requests now."""

    info: EngineInfo


class EngineFailed(_Message, frozen=True):
    """The engine could not start, or its loop raised: it ends after this message."""

    error: WireError


class RequestRejected(_Message, frozen=True):
    """The core refused this request; the others are not touched."""

    request_id: str
    error: WireError


class StepDone(_Message, frozen=True):
    """News of all requests after one step."""

    result: StepResult


ToEngine = StartEngine | EngineRequest | AbortRequests | StopEngine
FromEngine = ReportLine | EngineReady | EngineFailed | RequestRejected | StepDone

_encoder = msgspec.msgpack.Encoder()
_to_engine_decoder = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder = msgspec.msgpack.Decoder(FromEngine)


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    """Encode one message with its length in front."""
    frame = bytearray(FRAME_HEADER_BYTES)
    _encoder.encode_into(message, frame, FRAME_HEADER_BYTES)
    frame[:FRAME_HEADER_BYTES] = (len(frame) - FRAME_HEADER_BYTES).to_bytes(FRAME_HEADER_BYTES, "little")
    return bytes(frame)


class FrameReader:
    """Cuts a byte stream into frames. Feed it what arrived, take the complete frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add `data`; return the payloads of the frames that are complete now, in order."""
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= FRAME_HEADER_BYTES:
            end = start + FRAME_HEADER_BYTES + int.from_bytes(buffer[start : start + FRAME_HEADER_BYTES], "little")
            if len(buffer) < end:
                break
            frames.append(bytes(buffer[start + FRAME_HEADER_BYTES : end]))
            start = end
        if start:
            del buffer[:start]
        return frames


def decode_to_engine(payload: bytes) -> ToEngine:
    """Decode a frame that the API process sent."""
    return _to_engine_decoder.decode(payload)


def decode_from_engine(payload: bytes) -> FromEngine:
    """Decode a frame that the engine process sent."""
    return _from_engine_decoder.decode(payload)
