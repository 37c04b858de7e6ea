"""Locks that let one process at a time publish into a weight store, because replicas load the newest version.

In a local folder the lock is a kernel file lock, which is released when its holder exits for any reason. Elsewhere it
is a lease in a file, renewed with each version. Such stores have no atomic compare-and-set, so a conflict is detected
by reading the lease back. The store's clock tells the lease's age, since clocks of machines differ. A lease outlives a
killed holder, so its owner may take it again at once. If the old holder is still running, its next renewal fails.
"""

import contextlib
import os
import uuid
from pathlib import Path
from typing import Protocol

from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, ValidationError

from trackway.system import LockTaken, acquire_lock, writing
from trackway.wire.errors import ErrorCode, TrackwayError

LEASE_S = 1800.0
"""Seconds without a new version after which a lease expires."""


class PublisherLock(Protocol):
    """The right to publish, until it is closed."""

    def renew(self) -> None:
        """Renew the lock before each version. Raises CONFLICT when another publisher holds it."""
        ...

    def close(self) -> None:
        """Release the lock."""
        ...


class FlockPublisherLock:
    """A file lock on `<store>/publisher.lock`. The file's text names the holder."""

    def __init__(self, folder: Path, owner: str) -> None:
        holder = f"{owner} (process {os.getpid()})"
        with writing(folder, "the publisher's lock"):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = acquire_lock(folder / "publisher.lock", holder=holder, mode=None)
            except LockTaken as taken:
                raise _taken(str(folder), taken.holder, owner) from None

    def renew(self) -> None:
        """Does nothing: a file lock needs no renewal."""

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


class _Lease(BaseModel):
    owner: str
    token: str
    seconds: float
    """Seconds that it holds after it was written."""


class LeasePublisherLock:
    """A lease in `<store>/publisher.json`."""

    def __init__(self, fs: AbstractFileSystem, root: str, owner: str, lease_s: float = LEASE_S) -> None:
        self._fs, self._path, self._owner, self._lease_s = fs, f"{root}/publisher.json", owner, lease_s
        self._token = uuid.uuid4().hex
        lease = self._read()
        if lease is not None and lease.owner != owner and self._left_s(lease) > 0.0:
            raise self._lost_to(lease)
        self._write()

    def renew(self) -> None:
        """Extend the lease. Raises CONFLICT for a lost lease, even if it is free again."""
        self._require_ours()
        self._write()

    def close(self) -> None:
        """Release the lease if this object still holds it."""
        lease = self._read()
        if lease is not None and lease.token == self._token:
            self._fs.rm_file(self._path)

    def _write(self) -> None:
        lease = _Lease(owner=self._owner, token=self._token, seconds=self._lease_s)
        self._fs.pipe_file(self._path, lease.model_dump_json().encode())
        self._require_ours()

    def _require_ours(self) -> None:
        lease = self._read()
        if lease is None or lease.token != self._token:
            raise self._lost_to(lease)

    def _lost_to(self, lease: _Lease | None) -> TrackwayError:
        if lease is None:
            return _taken(self._path, "one that removed its lease", self._owner)
        name = f"{lease.owner}, resumed since" if lease.owner == self._owner else lease.owner
        return _taken(self._path, f"{name} (for {max(0.0, self._left_s(lease)):.0f} s more)", self._owner)

    def _left_s(self, lease: _Lease) -> float:
        """Seconds until the stored lease ends, by the store's clock."""
        probe = f"{self._path}.{self._token}"
        try:
            self._fs.pipe_file(probe, b"")
            age = self._fs.modified(probe) - self._fs.modified(self._path)
        except FileNotFoundError:  # released meanwhile
            return 0.0
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(probe)
        return lease.seconds - age.total_seconds()

    def _read(self) -> _Lease | None:
        try:
            return _Lease.model_validate_json(self._fs.cat_file(self._path))
        except (FileNotFoundError, ValidationError):
            return None


def _taken(where: str, holder: str, owner: str) -> TrackwayError:
    return TrackwayError(
        ErrorCode.CONFLICT,
        f"expected one publisher of weights in {where}, got {owner} besides {holder}; "
        "stop the other run, or give this one a separate weight store and replicas",
        holder=holder,
    )
