"""Copies of dataset files on any storage that fsspec can write to."""

from pathlib import Path

import fsspec

from trackway.wire.errors import ErrorCode, TrackwayError


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

    def put(self, file: Path) -> str:
        """Copy a file into the folder, replacing a file of the same name; return its URL. Raises TrackwayError."""
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.put_file(str(file), f"{self._root}/{file.name}")
        except Exception as error:  # each file system raises its own errors
            message = (
                f"expected to write {file.name} to {self.url}, got {type(error).__name__}: {error}; "
                f"{file} itself is complete: copy it by hand or try again"
            )
            raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error
        return f"{self.url}/{file.name}"
