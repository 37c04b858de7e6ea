"""The requests of a run that is driven by calls: `outputs/<run>/calls/requests.log`, append-only.

A record is a header (lengths of the call and the body, CRC-32 of everything else), the call as JSON, and the body. The
service appends. The run's process reads, and reads again from an earlier record after a restart.

The file begins with the offset of its first record. Offsets grow with the log: the service replaces the file by one
without the requests that are no longer needed, whose offsets are higher than all before.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import IO, Literal, NamedTuple
from zlib import crc32

from pydantic import Field, JsonValue

from trackway.system import replacing, writing
from trackway.wire.base import WireReply
from trackway.wire.errors import ErrorCode, TrackwayError

MAX_RECORD_BYTES = 64 * 2**20
"""Most bytes of one request."""
MAX_LOG_BYTES = 64 * 2**30
"""Most bytes of a run's log."""

UNNAMED = "s"
"""Mark in the policy's name of a snapshot without a path."""

_FIRST = struct.Struct("<Q")
_HEADER = struct.Struct("<III")
_LENGTHS = struct.Struct("<II")

Op = Literal[
    "create_model",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "unload_model",
]


class TrainingCall(WireReply):
    """An acknowledged request for a model. The record of a forward_backward also has a body."""

    id: str
    """`<model_id>:<seq_id>`. A repeated request has the same id."""
    model_id: str
    seq_id: int
    """Place among the model's requests: 0 for create_model, then from 1."""
    op: Op
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of the request by Tinker's names."""
    traceparent: str = ""
    """Trace that the request's span joins. Empty when nothing is traced."""
    links: dict[str, str] = Field(default_factory=dict[str, str])
    """The `traceparent` of each sampled sequence that the data name, by its id."""


class _Record(NamedTuple):
    end: int
    """Offset of the next record."""
    call: bytes
    body: bytes


class RequestLog:
    """The log in `folder`. Thread-safe. One process appends at a time."""

    def __init__(self, folder: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._file = folder / "requests.log"
        self._max_bytes = max_bytes
        self._digests: dict[str, bytes] | None = None
        """Digest of each request by id. None until this object appends for the first time."""
        self._appending = Lock()

    def append(self, call: TrainingCall, body: bytes = b"") -> bool:
        """Add a request. It is on disk on return. False if the log has it already.

        Raises CONFLICT when the log has another request of the same id, PAYLOAD_TOO_LARGE when the request or the log
        is too large, and StorageError.
        """
        content = call.model_dump_json(exclude_defaults=True).encode()
        digest = _digest(call, body)
        with self._appending, writing(self._file, "a request"):
            if self._digests is None:
                self._digests = self._opened()
            known = self._digests.get(call.id)
            if known is not None:
                if known != digest:
                    message = f"expected a repeated request {call.id} with its first content, got another content"
                    raise TrackwayError(ErrorCode.CONFLICT, f"{message}; send a new request with the next seq_id")
                return False
            self._write(content, body)
            self._digests[call.id] = digest
        return True

    def read(self, after: int = 0) -> Iterator[tuple[int, TrainingCall, bytes]]:
        """Yield the offset of the next record, the call and its body, from the record at `after` on.

        Ends before a record that is not whole, as a killed service leaves it, or one that is just being written. Raises
        CHECKPOINT_CORRUPT for a damaged record with others behind it.
        """
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            first = _first(file)
            file.seek(_FIRST.size + max(0, after - first))
            while record := self._next(file):
                call = TrainingCall.model_validate_json(record.call)
                yield first + record.end - _FIRST.size, call, record.body

    def has(self, id: str) -> bool:
        """Return whether the log has a request."""
        with self._appending:
            if self._digests is None:
                self._digests = self._opened()
            return id in self._digests

    @property
    def size(self) -> int:
        """Return the log's size in bytes."""
        with suppress(FileNotFoundError):
            return self._file.stat().st_size
        return 0

    def compact(self, is_needed: Callable[[TrainingCall], bool]) -> None:
        """Remove the requests that are not needed. Readers get the others again. Raises StorageError.

        A removed request that is repeated is a new one.
        """
        with self._appending, writing(self._file, "the requests of a session"), replacing(self._file) as draft:
            if self._digests is None:
                self._opened()
            digests: dict[str, bytes] = {}
            with self._file.open("rb") as old, draft.open("wb") as new:
                new.write(_FIRST.pack(_first(old) + self.size - _FIRST.size))
                while record := self._next(old):
                    call = TrainingCall.model_validate_json(record.call)
                    if is_needed(call):
                        new.write(_packed(record.call, record.body))
                        digests[call.id] = _digest(call, record.body)
                new.flush()
                os.fsync(new.fileno())
            self._digests = digests

    def _next(self, file: IO[bytes]) -> _Record | None:
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        call_bytes, body_bytes, checksum = _HEADER.unpack(header)
        end = start + _HEADER.size + call_bytes + body_bytes
        if end > size or header == bytes(_HEADER.size):  # a file system may fill what a crash left with zeros
            return None
        call, body = file.read(call_bytes), file.read(body_bytes)
        if _checksum(call, body) == checksum:
            return _Record(end, call, body)
        if end == size:
            return None
        message = f"expected a whole request at byte {start} of {self._file}, got a damaged one before others"
        raise TrackwayError(ErrorCode.CHECKPOINT_CORRUPT, f"{message}; start a new session from saved weights")

    def _opened(self) -> dict[str, bytes]:
        """Digest of each request by id. Cuts off a record that is not whole."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        digests: dict[str, bytes] = {}
        with self._file.open("ab+") as file:
            if os.fstat(file.fileno()).st_size < _FIRST.size:
                file.truncate(0)
                file.write(_FIRST.pack(0))
            file.seek(_FIRST.size)
            end = _FIRST.size
            while record := self._next(file):
                call = TrainingCall.model_validate_json(record.call)
                digests[call.id] = _digest(call, record.body)
                end = record.end
            file.truncate(end)
        return digests

    def _write(self, call: bytes, body: bytes) -> None:
        with self._file.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            record = _packed(call, body)
            _check_size(len(record), MAX_RECORD_BYTES, "a request", "send fewer data at once")
            _check_size(
                size + len(record), self._max_bytes, "a log of requests", "start a new session from saved weights"
            )
            unwritten = memoryview(record)
            try:
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
                os.fsync(file.fileno())
            except BaseException:
                os.ftruncate(file.fileno(), size)
                raise


def _first(file: IO[bytes]) -> int:
    """Offset of the first record, which is read next."""
    file.seek(0)
    header = file.read(_FIRST.size)
    return _FIRST.unpack(header)[0] if len(header) == _FIRST.size else 0


def _packed(call: bytes, body: bytes) -> bytes:
    return _HEADER.pack(len(call), len(body), _checksum(call, body)) + call + body


def _digest(call: TrainingCall, body: bytes) -> bytes:
    """Digest of a request without its trace, which is another one when the request is repeated."""
    content = call.model_dump_json(exclude={"traceparent", "links"}).encode()
    return sha256(_LENGTHS.pack(len(content), len(body)) + content + body).digest()


def _checksum(call: bytes, body: bytes) -> int:
    return crc32(body, crc32(call, crc32(_LENGTHS.pack(len(call), len(body)))))


def _check_size(size: int, most: int, what: str, remedy: str) -> None:
    if size > most:
        message = f"expected {what} of at most {most} bytes, got {size}; {remedy}"
        raise TrackwayError(ErrorCode.PAYLOAD_TOO_LARGE, message)
