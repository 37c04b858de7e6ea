"""The weight store: one folder per version on any fsspec URL, and `latest.json` with the newest version.

A version is published whole, as an anchor, or as a delta (weight_delta.py) against the version before. Its manifest has
the digests of the whole files in either case. Publishing copies the files, writes `manifest.json`, and then makes the
version visible in one atomic step, the replacement of `latest.json`. If a publisher dies at any point, readers stay at
the old version, and publishing again is safe. A folder above the latest version is left over from such a publisher and
may be overwritten. Version numbers are store-wide and increase over all runs.

    <url>/latest.json
    <url>/<version>/manifest.json, model.safetensors, ...
    <url>/<version>/manifest.json, model.safetensors.delta
    <url>/offer.json
    <url>/policies/<name>/latest.json, <version>/...

The root is the store of the service's default policy. Each named policy has a store of its own below it.

An offer says where the publisher also has the tensors of a version in memory. Nothing depends on it.

A replica keeps copies of what it cannot load in place in a cache folder, which the replicas of one host share: one of
them fetches or assembles a version under the folder's lock, and the others find it there.
"""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from trackway.clients import weight_delta
from trackway.clients.publisher_lock import FlockPublisherLock, LeasePublisherLock, PublisherLock
from trackway.system import atomic_write, digests, find_difference, locked, new_folder, remove_drafts
from trackway.system.files import FULL, NOT_WRITABLE, error_number, storage_error
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import (
    POLICIES,
    FileDigest,
    LatestWeights,
    UpdateMode,
    WeightDelta,
    WeightManifest,
    WeightOffer,
    WeightProof,
)

MANIFEST = "manifest.json"
LATEST = "latest.json"
OFFER = "offer.json"
CACHE_LOCK = ".lock"
CACHE_WAIT_S = 60.0
"""Longest wait for another replica of the host that fetches a version; then the fetch is to be tried again."""

_log = logging.getLogger("trackway.weights")


class WholeWeights(NamedTuple):
    """A published version and a folder with all its files."""

    manifest: WeightManifest
    folder: Path


class Writers(Protocol):
    """The processes that publish a version together, each some of its files. An OSError of any of them is raised."""

    def describe(self, folder: Path) -> list[FileDigest]:
        """Name, size and sha256 of the files directly inside a folder, by name."""
        ...

    def write_changes(
        self, folder: Path, files: Sequence[FileDigest], base: WholeWeights, scratch: Path
    ) -> list[FileDigest]:
        """Write the differences between these files and the base folder's to `scratch`. Return the files written."""
        ...

    def copy(self, store: "WeightStore", version: int, folder: Path, names: Sequence[str]) -> None:
        """Copy these files of a folder to a version's folder in the store."""
        ...


class WeightStore:
    """Published weights under one URL. Methods block. Call them from a thread in asynchronous code."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self.is_folder = isinstance(self._fs, LocalFileSystem)
        """True if versions that are published whole are read in place."""
        self.fetched_bytes = 0
        """Bytes copied from another storage, or read of deltas in a folder."""
        self.fallbacks = 0
        """How often a copy in the cache was damaged, or a version could not be had and its anchor was taken."""

    def claim(self, owner: str) -> PublisherLock:
        """Lock the store for one publisher. Raises CONFLICT with the holder's name when it is locked."""
        if self.is_folder:
            lock = FlockPublisherLock(Path(self._root), owner)
            remove_drafts(Path(self._root))
            return lock
        return LeasePublisherLock(self._fs, self._root, owner)

    def publish(
        self,
        version: int,
        run: str,
        folder: Path,
        proof: WeightProof,
        update_mode: UpdateMode | None = None,
        base: WholeWeights | None = None,
        writers: Writers | None = None,
    ) -> WeightManifest:
        """Make the files directly inside `folder` the newest version, which replicas check against `proof`.

        With a `base` the version is a delta against it where that takes at most half the bytes. `writers` copy the
        files, or None for this process. The manifest follows when all have. Publishing the same
        version with the same digests again does nothing. Raises CONFLICT when the version exists with other digests or
        is not greater than the latest. Raises DISK_FULL or NOT_WRITABLE when it cannot be written. Readers then stay
        at the old version, and the new one is removed.
        """
        writers = writers or OneWriter()
        files = writers.describe(folder)
        manifest = WeightManifest(version=version, run=run, files=files, proof=proof, update_mode=update_mode)
        latest = self.latest()
        if latest is not None and version <= latest.version:
            return self._published(manifest, latest)
        try:
            with _to_publish(folder, manifest, base, writers) as (stored, delta):
                manifest = manifest.model_copy(update={"delta": delta})
                self._copy(stored, manifest, writers)
            self._replace(f"{self._root}/{LATEST}", LatestWeights(version=version, run=run, path=str(version)))
        except OSError as error:
            raise self._unwritten(manifest, error) from error
        return manifest

    def latest(self) -> LatestWeights | None:
        """The newest version, or None when nothing is published. Raises WEIGHTS_CORRUPT if `latest.json` is invalid."""
        path = f"{self._root}/{LATEST}"
        try:
            return LatestWeights.model_validate_json(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            remedy = "restore it, or remove it and publish the next version"
            raise _unreadable(path, error, remedy) from error

    def manifest(self, version: int) -> WeightManifest:
        """The manifest of a version.

        Raises NOT_FOUND when the version was pruned or never published, and WEIGHTS_CORRUPT when its manifest is
        invalid or has no proof.
        """
        path = f"{self._path(version)}/{MANIFEST}"
        try:
            return WeightManifest.model_validate_json(self._fs.cat_file(path))
        except ValidationError as error:
            raise _unreadable(path, error, "publish a new version") from error
        except FileNotFoundError:
            raise TrackwayError(
                ErrorCode.NOT_FOUND,
                f"expected weights version {version} in {self.url}, got none; it was pruned or never published",
                version=version,
            ) from None

    def fetch(self, version: int, into: Path) -> Path:
        """A local folder with the version's files, each verified by size and sha256.

        For a version that is published whole in a folder it is that one. Others are copied or assembled in
        `into/<version>`, and a damaged copy there is replaced. Raises NOT_FOUND without a manifest, WEIGHTS_CORRUPT
        when a file is missing or differs, and LockTaken when another replica of the host fetches for too long.
        """
        manifest = self.manifest(version)
        if manifest.delta is None and self.is_folder:
            return verify(Path(self._path(version)), manifest)
        folder = into / str(version)
        with locked(into / CACHE_LOCK, wait_s=CACHE_WAIT_S):
            if folder.is_dir():
                difference = find_difference(folder, manifest.files)
                if difference is None:
                    return folder
                self._discard(folder, f"{difference.file} has sha256 {difference.got}")
            return self._download(manifest, folder) if manifest.delta is None else self._assemble(manifest, into)

    def anchor_before(self, version: int) -> int | None:
        """The newest version below this one that is published whole, or None without one."""
        for candidate in reversed(self.versions()):
            if candidate < version:
                with contextlib.suppress(TrackwayError):
                    if self.manifest(candidate).delta is None:
                        return candidate
        return None

    def policies(self) -> list[str]:
        """The names of the policies that have a published version, sorted."""
        self._fs.invalidate_cache()
        found = self._fs.glob(f"{self._root}/{POLICIES}/*/{LATEST}")
        return sorted(str(path).rsplit("/", 2)[-2] for path in found)

    def remove_policy(self, name: str) -> None:
        """Remove a named policy with all its versions, the newest version's name first."""
        folder = f"{self._root}/{POLICIES}/{name}"
        self._fs.rm(f"{folder}/{LATEST}")
        self._fs.rm(folder, recursive=True)

    def offer(self, offer: WeightOffer) -> None:
        """Say where else than here the tensors of a version are. Made before the version is visible."""
        self._fs.makedirs(self._root, exist_ok=True)
        self._replace(f"{self._root}/{OFFER}", offer)

    def withdraw(self) -> None:
        """End the offer, before the memory that it names gets other contents."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{OFFER}")

    def offered(self) -> WeightOffer | None:
        """The offer that stands, or None without one, or with one that cannot be read."""
        try:
            return WeightOffer.model_validate_json(self._fs.cat_file(f"{self._root}/{OFFER}"))
        except (FileNotFoundError, ValidationError):
            return None

    def versions(self) -> list[int]:
        """Versions that have a folder, oldest first. Those above the latest are unfinished."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` (at least 1) visible versions, and what these are deltas of.

        Returns the removed versions.
        """
        if keep < 1:
            raise ValueError(f"expected keep >= 1 (readers load the latest version), got {keep}")
        latest = self.latest()
        visible = [version for version in self.versions() if latest is not None and version <= latest.version]
        older = visible[:-keep]
        if not older:
            return []
        bases = self._bases(visible[-keep])
        removed = [version for version in older if version not in bases]
        for version in removed:
            self._fs.rm(self._path(version), recursive=True)
        return removed

    def _bases(self, version: int) -> set[int]:
        """The versions that this one is assembled from, without itself. Every version if a manifest is unreadable."""
        bases: set[int] = set()
        try:
            while (delta := self.manifest(version).delta) is not None and delta.base < version:
                version = delta.base
                bases.add(version)
        except TrackwayError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                return {*self.versions()}
        return bases

    def put(self, version: int, folder: Path, names: Iterable[str]) -> None:
        """Copy these files of a folder to a version's folder, which is visible only once it is published."""
        for name in names:
            self._fs.put_file(str(folder / name), f"{self._path(version)}/{name}")

    def _copy(self, folder: Path, manifest: WeightManifest, writers: Writers) -> None:
        target = self._path(manifest.version)
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)
        self._fs.makedirs(target, exist_ok=True)
        writers.copy(self, manifest.version, folder, [file.name for file in _stored(manifest)])
        self._replace(f"{target}/{MANIFEST}", manifest)

    def _unwritten(self, manifest: WeightManifest, error: OSError) -> Exception:
        """The error to raise for a file system error. Removes the copied files if the storage is full or read-only."""
        number = error_number(error)
        if number not in FULL | NOT_WRITABLE:
            return error
        with contextlib.suppress(OSError):
            self._fs.rm(self._path(manifest.version), recursive=True)
        size = sum(file.size for file in _stored(manifest))
        what = f"the {size} bytes of weights version {manifest.version}"
        if self.is_folder:
            remedy = "free space there, or keep fewer versions (trackway.keep_weights)" if number in FULL else None
            return storage_error(number, Path(self._path(manifest.version)), what, remedy)
        code = ErrorCode.DISK_FULL if number in FULL else ErrorCode.NOT_WRITABLE
        message = f"expected to write {what} to {self.url}, got '{error.strerror}'; free space or grant write access"
        return TrackwayError(code, message, version=manifest.version, bytes=size)

    def _published(self, manifest: WeightManifest, latest: LatestWeights) -> WeightManifest:
        version = manifest.version
        if version not in self.versions():
            raise TrackwayError(
                ErrorCode.CONFLICT,
                f"expected a version above {latest.version} (published by {latest.run}), got {version}; "
                "continue from the latest version",
                version=version,
                latest=latest.version,
            )
        present = self.manifest(version)
        if present.files != manifest.files:
            raise TrackwayError(
                ErrorCode.CONFLICT,
                f"version {version} is already published by {present.run} with other digests; publish as a new version",
                version=version,
                latest=latest.version,
            )
        return present

    def _download(self, manifest: WeightManifest, folder: Path) -> Path:
        with _room_for(folder, manifest.version):
            with new_folder(folder) as part:
                self._get(manifest.version, manifest.files, part)
                verify(part, manifest)
            return folder

    def _get(self, version: int, files: Iterable[FileDigest], folder: Path) -> None:
        """Copies these files from the store. Missing ones are left to the verification."""
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                self._fs.get_file(f"{self._path(version)}/{file.name}", str(folder / file.name))
                self.fetched_bytes += file.size

    def _assemble(self, manifest: WeightManifest, into: Path) -> Path:
        """Applies deltas to the newest copy in the cache, else to the anchor."""
        folder = into / str(manifest.version)
        with _room_for(folder, manifest.version):
            base, deltas = self._base(manifest, into)
            with tempfile.TemporaryDirectory(prefix=f".{manifest.version}.", dir=into) as scratch:
                changes = [(delta, self._changes(delta, Path(scratch))) for delta in reversed(deltas)]
                try:
                    _apply(base, changes, manifest, folder)
                    return folder
                except (TrackwayError, FileNotFoundError) as error:
                    if base.parent != into:
                        raise
                    self._discard(base, str(error))
        return self._assemble(manifest, into)  # from an older copy, or the anchor

    def _base(self, manifest: WeightManifest, into: Path) -> tuple[Path, list[WeightManifest]]:
        """A folder of whole files, and the deltas from there to this version, newest first.

        A copy in the cache is not verified: the digests of the result show whether it was right.
        """
        deltas = [manifest]
        while (delta := _delta(deltas[-1])).base < deltas[-1].version:
            copy = into / str(delta.base)
            if copy.is_dir():
                return copy, deltas
            base = self.manifest(delta.base)
            if base.delta is None:
                whole = Path(self._path(base.version))
                return verify(whole, base) if self.is_folder else self._download(base, copy), deltas
            deltas.append(base)
        raise TrackwayError(
            ErrorCode.WEIGHTS_CORRUPT,
            f"expected the manifest of weights version {deltas[-1].version} to name an older base, got {delta.base}; "
            "publish a new version",
        )

    def _changes(self, manifest: WeightManifest, scratch: Path) -> Path:
        """The verified files of a delta. Raises WEIGHTS_CORRUPT."""
        delta = _delta(manifest)
        if delta.encoding != weight_delta.ENCODING:
            message = (
                f"expected a delta of weights as {weight_delta.ENCODING}, got {delta.encoding}; update this service"
            )
            raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message, version=manifest.version)
        folder = Path(self._path(manifest.version))
        if not self.is_folder:
            folder = scratch / str(manifest.version)
            folder.mkdir()
            self._get(manifest.version, delta.files, folder)
        else:
            self.fetched_bytes += sum(file.size for file in delta.files)
        return _verify(folder, delta.files, manifest.version)

    def _discard(self, copy: Path, why: str) -> None:
        self.fallbacks += 1
        _log.warning("the copy of weights version %s in %s is damaged and made again: %s", copy.name, copy.parent, why)
        shutil.rmtree(copy)

    def _path(self, version: int) -> str:
        return f"{self._root}/{version}"

    def _replace(self, path: str, content: BaseModel) -> None:
        data = content.model_dump_json(indent=2).encode()
        if not self.is_folder:
            self._fs.pipe_file(path, data)  # an object store's put is atomic
            return
        atomic_write(Path(path), data)


def _unreadable(path: str, error: ValidationError, remedy: str) -> TrackwayError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "its JSON"
    message = f"expected {path} to be readable, got {where}: {first['msg']}; {remedy}"
    return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)


def version_of(folder: Path) -> int | None:
    """The version in a cache folder, complete (`7`) or partial (`.7.5f0e...`), or None for any other folder."""
    number = folder.name.removeprefix(".").split(".")[0]
    return int(number) if number.isdecimal() else None


class OneWriter:
    """This process, as the one that publishes all files of a version."""

    def describe(self, folder: Path) -> list[FileDigest]:
        """Implement `Writers.describe`."""
        return digests(folder, weight_files(folder))

    def write_changes(
        self, folder: Path, files: Sequence[FileDigest], base: WholeWeights, scratch: Path
    ) -> list[FileDigest]:
        """Implement `Writers.write_changes`."""
        return write_changes(folder, files, base, scratch)

    def copy(self, store: WeightStore, version: int, folder: Path, names: Sequence[str]) -> None:
        """Implement `Writers.copy`."""
        store.put(version, folder, names)


def weight_files(folder: Path) -> list[Path]:
    """The files directly inside a folder that are published, by name. Raises ValueError for none."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    if not files:
        raise ValueError(f"expected weight files in {folder}, got an empty folder")
    return files


def verify(folder: Path, manifest: WeightManifest) -> Path:
    """The folder, if it has the files of the manifest with their digests and no others; else raises WEIGHTS_CORRUPT."""
    _verify(folder, manifest.files, manifest.version)
    others = {path.name for path in folder.iterdir()} - {MANIFEST} - {file.name for file in manifest.files}
    if others:
        raise TrackwayError(
            ErrorCode.WEIGHTS_CORRUPT,
            f"expected only the files of the manifest in {folder}, got also {', '.join(sorted(others)[:3])}; "
            "remove them, or publish a new version",
            version=manifest.version,
        )
    return folder


def _verify(folder: Path, files: Iterable[FileDigest], version: int) -> Path:
    difference = find_difference(folder, files)
    if difference is None:
        return folder
    file, expected, got = difference
    raise TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"{file} of weights version {version}: expected sha256 {expected}, got {got}; "
        f"publish a new version (folder {folder})",
        version=version,
        file=file,
        expected=expected,
        got=got,
    )


def _stored(manifest: WeightManifest) -> list[FileDigest]:
    """The files in the version's folder."""
    return manifest.files if manifest.delta is None else manifest.delta.files


def _delta(manifest: WeightManifest) -> WeightDelta:
    if manifest.delta is None:
        raise ValueError(f"expected version {manifest.version} to be a delta, got one that is whole")
    return manifest.delta


@contextmanager
def _to_publish(
    folder: Path, manifest: WeightManifest, base: WholeWeights | None, writers: Writers
) -> Generator[tuple[Path, WeightDelta | None]]:
    """The folder to publish, and the delta that it is; the version's own folder without a small one."""
    if base is None:
        yield folder, None
        return
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        files = writers.write_changes(folder, manifest.files, base, Path(scratch))
        if sum(file.size for file in files) > weight_delta.LARGEST_SHARE * sum(file.size for file in manifest.files):
            yield folder, None
        else:
            version = base.manifest.version
            yield Path(scratch), WeightDelta(base=version, encoding=weight_delta.ENCODING, files=files)


def write_changes(folder: Path, files: Iterable[FileDigest], base: WholeWeights, scratch: Path) -> list[FileDigest]:
    """Write the differences between these files and the base folder's to `scratch`. Return the files written."""
    before = {file.name: file for file in base.manifest.files}
    written: list[Path] = []
    for file in files:
        new, old, changes = folder / file.name, base.folder / file.name, scratch / f"{file.name}{weight_delta.SUFFIX}"
        if before.get(file.name) == file:
            continue
        if file.name not in before or not weight_delta.encode(old, new, changes):
            changes = scratch / file.name
            changes.symlink_to(new.resolve())
        written.append(changes)
    return digests(scratch, written)


def _apply(base: Path, changes: list[tuple[WeightManifest, Path]], result: WeightManifest, folder: Path) -> None:
    """Make the folder of a version from its base's folder and the deltas since, oldest first."""
    names = {file.name for file in result.files}
    with new_folder(folder) as draft:
        for file in base.iterdir():
            if file.name in names:
                shutil.copyfile(file, draft / file.name)
        for manifest, delta in changes:
            for stored in _delta(manifest).files:
                changed = stored.name.removesuffix(weight_delta.SUFFIX)
                if changed not in names:
                    continue
                if changed == stored.name:
                    shutil.copyfile(delta / stored.name, draft / changed)
                else:
                    weight_delta.apply(delta / stored.name, draft / changed)
        verify(draft, result)


@contextmanager
def _room_for(folder: Path, version: int) -> Generator[None]:
    """A context in which a full disk is an error that names it."""
    try:
        yield
    except OSError as error:
        number = error_number(error)
        if number not in FULL:
            raise
        raise storage_error(number, folder, f"weights version {version}") from error
