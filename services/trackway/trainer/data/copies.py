"""Copies of datasets and checkpoints on any storage that fsspec can write to."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import fsspec

from trackway.system.files import StorageError
from trackway.wire.errors import ErrorCode, TrackwayError

T = TypeVar("T")


class RemoteFolder:
    """A folder at an fsspec URL or a path. Raises TrackwayError when no installed package opens the URL."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
            self._root = str(root).rstrip("/")
        except (ImportError, ValueError, OSError) as error:
            message = (
                f"expected a path or a URL that fsspec opens, got {url} ({error}); "
                "install the package for its protocol (s3fs for s3://, gcsfs for gs://) or choose another destination"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error

    def put(self, file: Path, name: str | None = None) -> str:
        """Copy a file into the folder, replacing a file of the same name. Return its URL. Raises StorageError."""
        name = name or file.name
        target = f"{self._root}/{name}"

        def copy() -> None:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(file), target)

        self._tried(copy, f"write {name} to {self.url}", f"{file} itself is complete: copy it by hand or try again")
        return f"{self.url}/{name}"

    def get(self, name: str, file: Path) -> None:
        """Copy a file of the folder to this machine. Raises StorageError."""
        file.parent.mkdir(parents=True, exist_ok=True)
        remedy = "check the URL and the credentials"
        self._tried(lambda: self._fs.get_file(f"{self._root}/{name}", str(file)), f"read {name} of {self.url}", remedy)

    def has(self, name: str) -> bool:
        """Return whether the folder has a file or folder of this name. Raises StorageError."""
        return name in self.names()

    def names(self) -> list[str]:
        """Return the names directly inside the folder, none if it does not exist. Raises StorageError."""

        def listed() -> list[str]:
            self._fs.invalidate_cache()
            try:
                return [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
            except FileNotFoundError:
                return []

        return self._tried(listed, f"list {self.url}", "check the URL and the credentials")

    def remove(self, name: str) -> None:
        """Remove a file or folder if it exists. Raises StorageError."""
        if self.has(name):
            remedy = "check the permissions"
            self._tried(
                lambda: self._fs.rm(f"{self._root}/{name}", recursive=True), f"remove {name} of {self.url}", remedy
            )

    def _tried(self, act: Callable[[], T], what: str, remedy: str) -> T:
        try:
            return act()
        except Exception as error:  # each file system raises its own errors
            message = f"expected to {what}, got {type(error).__name__}: {error}; {remedy}"
            raise StorageError(ErrorCode.UNAVAILABLE, message, path=self.url) from error
