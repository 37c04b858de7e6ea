"""The weight store: one folder per version on any fsspec URL, and `latest.json` with the newest version.

Publishing copies the files, writes `manifest.json`, and then makes the version visible in one atomic step, the
replacement of `latest.json`. If a publisher dies at any point, readers stay at the old version, and publishing again is
safe. A folder above the latest version is left over from such a publisher and may be overwritten. Version numbers are
store-wide and increase over all runs.

    <url>/latest.json
    <url>/<version>/manifest.json, model.safetensors, ...
"""

import contextlib
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ValidationError

from trackway.clients.publisher_lock import FlockPublisherLock, LeasePublisherLock, PublisherLock
from trackway.system import atomic_write, digests, find_difference, new_folder, remove_drafts
from trackway.system.storage import FULL, NOT_WRITABLE, error_number, storage_error
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Canary, FileDigest, LatestWeights, UpdateMode, WeightManifest, WeightProof

MANIFEST = "manifest.json"
LATEST = "latest.json"


class WeightStore:
    """Published weights under one URL. Methods block; call them from a thread in asynchronous code."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def claim(self, owner: str) -> PublisherLock:
        """Lock the store for one publisher; raises CONFLICT with the holder's name when it is locked."""
        if isinstance(self._fs, LocalFileSystem):
            lock = FlockPublisherLock(Path(self._root), owner)
            remove_drafts(Path(self._root))
            return lock
        return LeasePublisherLock(self._fs, self._root, owner)

    def publish(
        self,
        version: int,
        run: str,
        folder: Path,
        canary: Canary | None = None,
        proof: WeightProof | None = None,
        update_mode: UpdateMode | None = None,
    ) -> WeightManifest:
        """Make the files directly inside `folder` the newest version.

        Publishing the same version with the same digests again does nothing. Raises CONFLICT when the version exists
        with other digests or is not greater than the latest. Raises DISK_FULL or NOT_WRITABLE when it cannot be
        written; readers then stay at the old version, and the new one is removed.
        """
        manifest = WeightManifest(
            version=version, run=run, files=describe(folder), canary=canary, proof=proof, update_mode=update_mode
        )
        latest = self.latest()
        if latest is not None and version <= latest.version:
            return self._published(manifest, latest)
        try:
            self._copy(folder, manifest)
            self._replace(f"{self._root}/{LATEST}", LatestWeights(version=version, run=run, path=str(version)))
        except OSError as error:
            raise self._unwritten(manifest, error) from error
        return manifest

    def latest(self) -> LatestWeights | None:
        """The newest version, or None when nothing is published; raises WEIGHTS_CORRUPT if `latest.json` is invalid."""
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
        invalid: earlier releases published NaN weights with a proof of nulls.
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

        For a local store, this is the verified folder of the version itself; from other stores, files are copied to
        `into/<version>`. Raises NOT_FOUND without a manifest and WEIGHTS_CORRUPT when a file is missing or differs.
        """
        manifest = self.manifest(version)
        if isinstance(self._fs, LocalFileSystem):
            return verify(Path(self._path(version)), manifest)
        folder = into / str(version)
        if folder.is_dir():
            return verify(folder, manifest)
        return self._download(manifest, folder)

    def versions(self) -> list[int]:
        """Versions that have a folder, oldest first; those above the latest are unfinished."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        return sorted(int(name) for name in names if name.isdecimal())

    def prune(self, keep: int) -> list[int]:
        """Remove all but the newest `keep` (at least 1) visible versions; returns the removed versions."""
        if keep < 1:
            raise ValueError(f"expected keep >= 1 (readers load the latest version), got {keep}")
        latest = self.latest()
        visible = [version for version in self.versions() if latest is not None and version <= latest.version]
        for version in visible[:-keep]:
            self._fs.rm(self._path(version), recursive=True)
        return visible[:-keep]

    def _copy(self, folder: Path, manifest: WeightManifest) -> None:
        target = self._path(manifest.version)
        if self._fs.exists(target):
            self._fs.rm(target, recursive=True)
        self._fs.makedirs(target, exist_ok=True)
        for file in manifest.files:
            self._fs.put_file(str(folder / file.name), f"{target}/{file.name}")
        self._replace(f"{target}/{MANIFEST}", manifest)

    def _unwritten(self, manifest: WeightManifest, error: OSError) -> Exception:
        """The error to raise for a file system error; removes the copied files if the storage is full or read-only."""
        number = error_number(error)
        if number not in FULL | NOT_WRITABLE:
            return error
        with contextlib.suppress(OSError):
            self._fs.rm(self._path(manifest.version), recursive=True)
        size = sum(file.size for file in manifest.files)
        what = f"the {size} bytes of weights version {manifest.version}"
        if isinstance(self._fs, LocalFileSystem):
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
        try:
            with new_folder(folder) as part:
                for file in manifest.files:
                    try:
                        self._fs.get_file(f"{self._path(manifest.version)}/{file.name}", str(part / file.name))
                    except FileNotFoundError:
                        continue  # verify() below says which file is missing
                verify(part, manifest)
            return folder
        except OSError as error:
            number = error_number(error)
            if number not in FULL:
                raise
            raise storage_error(number, folder, f"weights version {manifest.version}") from error

    def _path(self, version: int) -> str:
        return f"{self._root}/{version}"

    def _replace(self, path: str, content: BaseModel) -> None:
        data = content.model_dump_json(indent=2).encode()
        if not isinstance(self._fs, LocalFileSystem):
            self._fs.pipe_file(path, data)  # an object store's put is atomic
            return
        atomic_write(Path(path), data)


def _unreadable(path: str, error: ValidationError, remedy: str) -> TrackwayError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, first["loc"])) or "its JSON"
    message = f"expected {path} to be readable, got {where}: {first['msg'][:200]}; {remedy}"
    return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)


def version_of(folder: Path) -> int | None:
    """The version in a cache folder, complete (`7`) or partial (`.7.5f0e...`); None for any other folder."""
    number = folder.name.removeprefix(".").split(".")[0]
    return int(number) if number.isdecimal() else None


def describe(folder: Path) -> list[FileDigest]:
    """Name, size and sha256 of the files directly inside a folder, by name."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    if not files:
        raise ValueError(f"expected weight files in {folder}, got an empty folder")
    return digests(folder, files)


def verify(folder: Path, manifest: WeightManifest) -> Path:
    """The folder, if each file of the manifest exists with its digest; else raises WEIGHTS_CORRUPT."""
    difference = find_difference(folder, manifest.files)
    if difference is None:
        return folder
    file, expected, got = difference
    raise TrackwayError(
        ErrorCode.WEIGHTS_CORRUPT,
        f"{file} of weights version {manifest.version}: expected sha256 {expected}, got {got}; "
        f"publish a new version (folder {folder})",
        version=manifest.version,
        file=file,
        expected=expected,
        got=got,
    )
