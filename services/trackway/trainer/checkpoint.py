"""Checkpoints in verl's layout; a crash at any moment leaves the newest complete one to be found.

<root>/global_step_<N>/actor/              Learner.save
                       actor/huggingface/  Learner.export: usable by transformers and any engine
                       state.json          the loop's state: position in the data, counters
<root>/latest_checkpointed_iteration.txt   N, written last

A checkpoint is made in a hidden folder and renamed when everything in it is on the disk, so a folder that is called
`global_step_<N>` is complete.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Protocol

from pydantic import JsonValue

from trackway.trainer.config import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError

LATEST = "latest_checkpointed_iteration.txt"
PREFIX = "global_step_"
MAKING = ".making_"
REPLACED = ".replaced_"


class Checkpointable(Protocol):
    """What a checkpoint needs of a learner."""

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def export(self, folder: Path) -> None: ...


def save_checkpoint(
    root: Path, step: int, learner: Checkpointable, state: dict[str, JsonValue], keep: int | None = None
) -> Path:
    """Writes `global_step_<step>`, names it the latest, then removes all but the newest `keep`; returns its folder."""
    if keep is not None and keep < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, got {keep}; use None to keep all")
    root.mkdir(parents=True, exist_ok=True)
    _clear(root, MAKING)
    making = root / f"{MAKING}{PREFIX}{step}"
    learner.save(making / "actor")
    learner.export(making / "actor" / "huggingface")
    (making / "state.json").write_text(json.dumps(state))
    _sync(making)
    folder = root / f"{PREFIX}{step}"
    _put(making, folder)
    _write_latest(root, step)
    if keep is not None:
        _prune(root, step, keep)
    _clear(root, REPLACED)
    return folder


def find_latest(root: Path) -> Path | None:
    """The newest complete checkpoint: the named latest one, else the highest step, else None."""
    file = root / LATEST
    if file.exists():
        named = root / f"{PREFIX}{file.read_text().strip()}"
        for folder in (named, root / f"{REPLACED}{named.name}"):
            if folder.is_dir():
                return folder
    steps = _steps(root)
    return root / f"{PREFIX}{steps[-1]}" if steps else None


def named_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint of `trainer.resume_from_path`; None unless `resume_mode` asks for it.

    Raises TrackwayError(INVALID_REQUEST) when the key is missing or names no checkpoint.
    """
    trainer = config.trainer
    if trainer.resume_mode != "resume_path":
        return None
    if not trainer.resume_from_path:
        raise _refused("expected .../global_step_<n> with trainer.resume_mode=resume_path, got nothing")
    path = Path(trainer.resume_from_path).expanduser()
    if (path / "state.json").is_file():
        return path
    near = sorted(one.name for place in (path, path.parent) for one in place.glob(f"{PREFIX}*") if one.is_dir())
    found = f"; near it are {', '.join(near)}" if near else ""
    raise _refused(f"expected a checkpoint, .../global_step_<n> with a state.json, got {path}{found}")


def load_checkpoint(path: Path, learner: Checkpointable) -> dict[str, JsonValue]:
    """Puts the learner back to a checkpoint folder and returns the loop's state.

    Raises FileNotFoundError when the folder is no checkpoint.
    """
    if not (path / "state.json").is_file():
        raise FileNotFoundError(
            f"expected a checkpoint with state.json, got {path}; name a global_step_<N> folder or start without resume"
        )
    learner.load(path / "actor")
    return json.loads((path / "state.json").read_text())


def _refused(reason: str) -> TrackwayError:
    return TrackwayError(
        ErrorCode.INVALID_REQUEST, f"trainer.resume_from_path: {reason}", key="trainer.resume_from_path"
    )


def _put(making: Path, folder: Path) -> None:
    """Renames into place; an older checkpoint of the same step stays findable until then."""
    if folder.exists():
        _set_aside(folder)
    making.rename(folder)
    _sync_one(folder.parent)


def _write_latest(root: Path, step: int) -> None:
    making = root / f"{MAKING}{LATEST}"
    making.write_text(str(step))
    _sync_one(making)
    making.replace(root / LATEST)
    _sync_one(root)


def _steps(root: Path) -> list[int]:
    names = [folder.name.removeprefix(PREFIX) for folder in root.glob(f"{PREFIX}*") if folder.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _prune(root: Path, latest: int, keep: int) -> None:
    others = [step for step in _steps(root) if step != latest]
    for step in others[: max(0, len(others) - (keep - 1))]:
        _set_aside(root / f"{PREFIX}{step}")


def _set_aside(folder: Path) -> None:
    """To be removed: half of it must not go by its name."""
    aside = folder.with_name(f"{REPLACED}{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _clear(root: Path, prefix: str) -> None:
    for leftover in root.glob(f"{prefix}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _sync(folder: Path) -> None:
    """Everything under a folder is on the disk when this returns."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync_one(Path(parent) / name)
        _sync_one(Path(parent))


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
