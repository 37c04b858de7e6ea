"""The files of a run that is driven by calls, without torch.

calls/results/                                                one file per request
calls/models/<digest of the model's id>/state.safetensors     as its last change of weights left it
calls/models/<digest of the model's id>/weights/<digest of a name>.safetensors

The run's process writes them. The service reads results, and removes those that are not needed any more.
"""

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

from trackway.system import atomic_write, writing
from trackway.wire.base import checked_run_name
from trackway.wire.errors import ErrorCode, TrackwayError

_PATH = re.compile(r"tinker://(?P<model_id>(?P<run>[^/:]+):train:\d+)/weights/(?P<name>[^/]+)")


def digest_of(text: str) -> str:
    """A name for files of what the network named."""
    return sha256(text.encode()).hexdigest()[:32]


def model_folder(calls: Path, model_id: str) -> Path:
    """Folder of a model's files."""
    return calls / "models" / digest_of(model_id)


def weights_file(outputs: Path, path: str) -> Path:
    """The file of `tinker://<run>:train:<n>/weights/<name>` below the runs' folder. Raises INVALID_REQUEST."""
    named = _PATH.fullmatch(path)
    if named is None:
        message = f"expected tinker://<model_id>/weights/<name>, got {path[:256]!a}; take the path of save_state"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    try:
        run = checked_run_name(named["run"])
    except ValueError as error:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, str(error)) from error
    return (
        model_folder(outputs / run / "calls", named["model_id"]) / "weights" / f"{digest_of(named['name'])}.safetensors"
    )


Kind = Literal["json", "protobuf", "error"]


class Result(NamedTuple):
    """The outcome of a request."""

    kind: Kind
    body: bytes
    """JSON or protobuf. That of an error is JSON of `error` (the message) and `category` ("user" or "server")."""

    @classmethod
    def of_error(cls, message: str, category: Literal["user", "server"]) -> "Result":
        """The outcome of a request that failed."""
        return cls("error", json.dumps({"error": message, "category": category}).encode())


class Results:
    """The results in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "results"

    def write(self, id: str, result: Result) -> None:
        """Keep the result of a request. Raises StorageError."""
        with writing(self._folder, "the result of a request"):
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._file(id), result.kind.encode() + b"\n" + result.body)

    def read(self, id: str) -> Result | None:
        """Return the result of a request, or None while there is no result."""
        try:
            kind, separator, body = self._file(id).read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        if not separator or kind.decode(errors="replace") not in get_args(Kind):
            message = f"expected the result of request {id} in {self._file(id)}, got a damaged file"
            raise TrackwayError(ErrorCode.CHECKPOINT_CORRUPT, f"{message}; remove it and resume the run")
        return Result(cast(Kind, kind.decode()), body)

    def written_at(self, id: str) -> float | None:
        """Return when the result was written, in seconds since 1970. None while there is no result."""
        try:
            return self._file(id).stat().st_mtime
        except FileNotFoundError:
            return None

    def seq_ids(self, model_id: str) -> list[int]:
        """Return the sequence ids of a model's requests that have a result, in order."""
        files = self._folder.glob(f"{digest_of(model_id)}.*")
        return sorted(int(file.suffix.removeprefix(".")) for file in files)

    def remove(self, id: str) -> None:
        """Remove the result of a request, if there is one."""
        self._file(id).unlink(missing_ok=True)

    def _file(self, id: str) -> Path:
        model_id, _, seq_id = id.rpartition(":")
        return self._folder / f"{digest_of(model_id)}.{int(seq_id)}"
