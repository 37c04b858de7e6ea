"""The samples of a session that were acknowledged: `calls/samples.log`, a JSON line each.

A sample that was not retrieved when the service was lost is drawn again from its record, with its seed.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from trackway.system import append_line, writing
from trackway.wire.base import NON_FINITE
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tinker import SampleRequest

MAX_FILE_BYTES = 64 * 2**20
"""Bytes after which a new file begins. The one before is kept, older samples are forgotten."""


class SampleRecord(BaseModel):
    """A sample, as it was acknowledged."""

    model_config = {"ser_json_inf_nan": NON_FINITE}

    id: str
    """`<sampling session>:<seq_id>`."""
    request: SampleRequest
    seed: int
    """Seed of the first sequence. Sequence i has `seed + i`."""
    traceparent: str = ""
    """Span of the sample, or the trace that it joins."""

    @property
    def sequence_ids(self) -> list[str]:
        """Return the id of each sequence."""
        return [f"{self.id}:{index}" for index in range(self.request.num_samples)]


class SampleLog:
    """The log in `folder`, for one process. Thread-safe."""

    def __init__(self, folder: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._new, self._old = folder / "samples.log", folder / "samples.old.log"
        self._max_file_bytes = max_file_bytes
        self._lock, self._syncing = Lock(), Lock()
        self._count = self._synced = 0
        """Records that were written, and the number of them on disk."""
        self._index: dict[str, _Place] | None = None
        """Place of each record. None until first needed."""

    def append(self, record: SampleRecord) -> SampleRecord:
        """Add a record, which is on disk on return. A repeated request gets its first record.

        Raises INVALID_REQUEST for another request under the same id, and StorageError.
        """
        with self._lock:
            record, written = self._written(record), self._count
        with self._syncing, writing(self._new, "a sample request"):
            if written > self._synced:  # else another thread's fsync has covered it
                self._sync()
        return record

    def _written(self, record: SampleRecord) -> SampleRecord:
        index = self._opened()
        if record.id in index:
            return self._repeated(record, index)
        offset = self._new.stat().st_size if self._new.exists() else 0
        if offset > self._max_file_bytes:
            with self._syncing, writing(self._new, "the samples of a session"):
                self._sync()
                self._new.replace(self._old)
            index = {id: place._replace(file=self._old) for id, place in index.items() if place.file == self._new}
            self._index, offset = index, 0
        append_line(self._new, record.model_dump_json(exclude_defaults=True), what="a sample request")
        index[record.id] = _Place(self._new, offset, record.traceparent)
        self._count += 1
        return record

    def _sync(self) -> None:
        count = self._count
        with self._new.open("rb") as file:
            os.fsync(file.fileno())
        self._synced = count

    def find(self, id: str) -> SampleRecord:
        """Return the record of a sample. Raises GONE for one that was never acknowledged, or long ago."""
        with self._lock:
            place = self._opened().get(id)
            if place is None:
                message = f"expected a sample that was acknowledged lately, got {id}; request it again"
                raise TrackwayError(ErrorCode.GONE, message)
            return self._read(place)

    def traceparents(self, sequence_ids: Iterable[str]) -> dict[str, str]:
        """Return the `traceparent` of each of these sequences whose sample is traced."""
        with self._lock:
            index = self._opened()
            places = ((id, index.get(id.rpartition(":")[0])) for id in sequence_ids)
            return {id: place.traceparent for id, place in places if place is not None and place.traceparent}

    def remove(self) -> None:
        """Forget all samples."""
        with self._lock:
            for file in (self._new, self._old):
                file.unlink(missing_ok=True)
            self._index = {}

    def _repeated(self, record: SampleRecord, index: dict[str, "_Place"]) -> SampleRecord:
        first = self._read(index[record.id])
        if first.request.model_dump() == record.request.model_dump():
            return first
        message = f"expected a repeated sample {record.id} with its first content, got another; use the next seq_id"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)

    def _read(self, place: "_Place") -> SampleRecord:
        with place.file.open("rb") as file:
            file.seek(place.offset)
            return SampleRecord.model_validate_json(file.readline())

    def _opened(self) -> "dict[str, _Place]":
        """Return the place of each record. Cuts off a line that is not whole."""
        if self._index is None:
            self._index = {id: place for file in (self._old, self._new) for id, place in _records(file)}
        return self._index


class _Place(NamedTuple):
    file: Path
    offset: int
    traceparent: str


def _records(path: Path) -> Iterator[tuple[str, _Place]]:
    if not path.exists():
        return
    with path.open("rb+") as file:
        offset = 0
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(offset)
                return
            with suppress(ValidationError):  # a crash of the machine may leave a damaged line
                record = SampleRecord.model_validate_json(line)
                yield record.id, _Place(path, offset, record.traceparent)
            offset += len(line)
