"""Who may publish into a weight store: one process at a time, since replicas follow whatever is newest.

In a folder the claim is a lock of the kernel, which lets go when its holder dies however it dies. Elsewhere it is a
lease in a file, renewed with each version; such stores offer no atomic compare, so two that claim within the same
moment are told apart by reading back, not by a lock. A lease outlives a holder that was killed, so its owner may claim
it anew at once; should the holder live after all, its next renewal fails.
"""

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import IO, Protocol

from fsspec.spec import AbstractFileSystem
from pydantic import BaseModel, ValidationError

from trackway.system import writing
from trackway.wire.errors import ErrorCode, TrackwayError

LEASE_S = 1800.0
"""A publisher elsewhere than in a folder that has not published for so long is taken for dead."""


class PublisherLock(Protocol):
    """The right to publish, until it is closed."""

    def renew(self) -> None:
        """Before each version; raises CONFLICT when another publisher has the claim by now."""
        ...

    def close(self) -> None:
        """Let others publish."""
        ...


class FolderClaim:
    """A lock on `<store>/publisher.lock`, whose text says who holds it."""

    def __init__(self, folder: Path, owner: str) -> None:
        with writing(folder, "the publisher's lock"):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (folder / "publisher.lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise _taken(str(folder), holder, owner) from None
        with contextlib.suppress(OSError):  # a lock without a name on a full disk is one all the same
            self._file.truncate(0)
            self._file.write(f"{owner} (process {os.getpid()})")
            self._file.flush()

    def renew(self) -> None:
        """A lock needs no renewal."""

    def close(self) -> None:
        """Closing the file lets go of the lock."""
        self._file.close()


class _Lease(BaseModel):
    owner: str
    token: str
    until: float
    """Unix time."""


class LeaseClaim:
    """A lease in `<store>/publisher.json`."""

    def __init__(self, fs: AbstractFileSystem, root: str, owner: str, lease_s: float = LEASE_S) -> None:
        self._fs, self._path, self._owner, self._lease_s = fs, f"{root}/publisher.json", owner, lease_s
        self._token = uuid.uuid4().hex
        found = self._read()
        if found is not None and found.owner != owner and found.until > time.time():
            raise self._lost_to(found)
        self._write()

    def renew(self) -> None:
        """Keep the lease; one that was lost is not taken back, even if it is free again."""
        self._require_ours()
        self._write()

    def close(self) -> None:
        """Give the lease back if it is still ours."""
        found = self._read()
        if found is not None and found.token == self._token:
            self._fs.rm_file(self._path)

    def _write(self) -> None:
        lease = _Lease(owner=self._owner, token=self._token, until=time.time() + self._lease_s)
        self._fs.pipe_file(self._path, lease.model_dump_json().encode())
        self._require_ours()

    def _require_ours(self) -> None:
        found = self._read()
        if found is None or found.token != self._token:
            raise self._lost_to(found)

    def _lost_to(self, found: _Lease | None) -> TrackwayError:
        if found is None:
            return _taken(self._path, "one that removed its lease", self._owner)
        name = f"{found.owner}, resumed since" if found.owner == self._owner else found.owner
        return _taken(self._path, f"{name} (for {max(0.0, found.until - time.time()):.0f} s more)", self._owner)

    def _read(self) -> _Lease | None:
        try:
            return _Lease.model_validate_json(self._fs.cat_file(self._path))
        except (FileNotFoundError, ValidationError):
            return None


def _taken(where: str, holder: str, owner: str) -> TrackwayError:
    return TrackwayError(
        ErrorCode.CONFLICT,
        f"expected one publisher of weights, got {owner} beside {holder} in {where}; "
        "stop the other run, or give this one a weight store and replicas of its own",
        holder=holder,
    )
