"""The files of models in training by calls, without torch.

calls/models/<digest of the model's id>/state.safetensors     as its last change of weights left it
calls/models/<digest of the model's id>/weights/<digest of a name>.safetensors
"""

import re
from hashlib import sha256
from pathlib import Path

from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.names import checked_run_name

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
