"""Checkpoints in verl's layout. After a crash at any moment, the newest complete checkpoint can be found.

<root>/global_step_<N>/actor/              weights, moments, random state: a file each, from several ranks one of each
                       critic/             the same of the value model, if there is one
                       actor/huggingface/  a Hugging Face folder, with `checkpoint.save_contents=[..., hf_model]`
                       state.json          the loop's state: position in the data, counters
                       finished.parquet    trajectories that are not trained yet. Absent when there are none
                       manifest.json       sha256 of every other file, and the release that wrote them
<root>/latest_checkpointed_iteration.txt   N, written last
<root>/damaged_global_step_<N>/            a damaged checkpoint, kept for inspection

A checkpoint is written to a hidden folder and renamed once its contents are on disk, so every folder named
`global_step_<N>` is complete. Its digests are verified on load.

`trainer.default_hdfs_dir` gets a copy of each in `<url>/<run>/global_step_<N>`, of which the manifest is written last.
"""

import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, JsonValue, ValidationError
from pydantic_core import to_json
from safetensors import SafetensorError

from trackway.learner.finite import NotFiniteError
from trackway.run_config import RunConfig
from trackway.system import digests, find_difference, replacing, writing
from trackway.trainer.data.copies import RemoteFolder
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.base import NON_FINITE
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import FileDigest

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "state.json"
FINISHED = "finished.parquet"
PREFIX = "global_step_"
DAMAGED = "damaged_"
MAKING = ".making_"
REPLACED = ".replaced_"

FORMAT = 1
"""Format of checkpoints. Raised when a release writes what earlier ones cannot read."""
RELEASE = version("trackway")

logger = logging.getLogger("trackway.trainer")


class Manifest(BaseModel):
    """The files of a checkpoint, with their digests, and what wrote them."""

    files: list[FileDigest]
    release: str
    """Release of Trackway."""
    format: int


class Loadable(Protocol):
    """The method of a learner that a checkpoint uses."""

    def load(self, folder: Path) -> None: ...


def save_checkpoint(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    state: dict[str, JsonValue],
    keep: int | None = None,
    finished: Sequence[Trajectory] = (),
) -> Path:
    """Write `global_step_<step>`, mark it as the latest, remove all but the newest `keep`. Return its folder.

    `write` writes what continues the training to a folder: a learner's `save`, or its snapshot's.
    Raises StorageError when the disk is full or cannot be written. The partial checkpoint is removed.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"expected to keep at least 1 checkpoint, got {keep}; use None to keep all")
    folder = root / f"{PREFIX}{step}"
    with writing(folder, f"the checkpoint of step {step}"):
        root.mkdir(parents=True, exist_ok=True)
        for prefix in (MAKING, f".{LATEST}."):
            _clear(root, prefix)
        making = root / f"{MAKING}{PREFIX}{step}"
        try:
            write(making / "actor")
            (making / STATE).write_bytes(to_json(state, inf_nan_mode=NON_FINITE))
            if finished:
                write_trajectories(making / FINISHED, finished)
            with ThreadPoolExecutor(1) as pool:  # sync to disk and hash in parallel
                syncing = pool.submit(_sync, making)
                manifest = _manifest(making)
                syncing.result()
            (making / MANIFEST).write_text(manifest.model_dump_json(indent=2))
            _sync_one(making / MANIFEST)
            _sync_one(making)
            _put(making, folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        _write_latest(root, step)
        if keep is not None:
            _prune(root, step, keep)
        _clear(root, REPLACED)
    return folder


def find_latest(root: Path) -> Path | None:
    """The checkpoint marked as the latest, else the one with the highest step, else None."""
    return next(iter(find_all(root)), None)


def find_all(root: Path) -> list[Path]:
    """All complete checkpoints in order of preference: the one marked as the latest, then by descending step."""
    folders = [root / f"{PREFIX}{step}" for step in reversed(_steps(root))]
    file = root / LATEST
    if not file.exists():
        return folders
    step = file.read_text(errors="replace").strip()
    if not step.isdecimal():
        return folders
    name = PREFIX + step
    latest = next((folder for folder in (root / name, root / f"{REPLACED}{name}") if folder.is_dir()), None)
    return folders if latest is None else [latest, *(folder for folder in folders if folder.name != name)]


def copy_checkpoint(folder: Path, url: str, keep: int | None = None) -> None:
    """Copy a checkpoint to `<url>/global_step_<N>`, and remove all but the newest `keep` copies.

    Raises StorageError when the storage refuses it. Copying again is safe.
    """
    parent, copy = RemoteFolder(url), RemoteFolder(f"{url}/{folder.name}")
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    copy.remove(MANIFEST)
    for file in manifest.files:
        copy.put(folder / file.name, file.name)
    copy.put(folder / MANIFEST)
    others = [name for step in _numbers(parent.names()) if (name := f"{PREFIX}{step}") != folder.name]
    for name in [] if keep is None else others[: max(0, len(others) - (keep - 1))]:
        RemoteFolder(f"{url}/{name}").remove(MANIFEST)
        parent.remove(name)


def fetch_checkpoint(url: str, scratch: Path) -> Path:
    """Fetch a copy of a checkpoint into a folder and verify it. Return its folder there.

    Raises StorageError when it cannot be read, and CHECKPOINT_CORRUPT when a file differs from its digest.
    """
    copy, folder = RemoteFolder(url), scratch / PREFIX.rstrip("_")
    copy.get(MANIFEST, folder / MANIFEST)
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        raise _corrupt(url, f"{MANIFEST}: expected digests of files, got {error.error_count()} errors in it") from error
    for file in manifest.files:
        copy.get(file.name, folder / file.name)
    damage = find_damage(folder)
    if damage is not None:
        raise _corrupt(url, damage)
    return folder


def check_storage(config: RunConfig) -> None:
    """Raise TrackwayError if the named checkpoint is missing, or the folder of copies cannot be read."""
    named_checkpoint(config)
    if config.trainer.default_hdfs_dir:
        RemoteFolder(config.trainer.default_hdfs_dir).names()


def named_checkpoint(config: RunConfig) -> Path | str | None:
    """The checkpoint of `trainer.resume_from_path`, or its URL. None unless `resume_mode` is `resume_path`.

    Raises TrackwayError(INVALID_REQUEST) when the key is missing or names no checkpoint.
    """
    trainer = config.trainer
    if trainer.resume_mode != "resume_path":
        return None
    if not trainer.resume_from_path:
        raise _refused("expected .../global_step_<n> with trainer.resume_mode=resume_path, got nothing")
    if "://" in trainer.resume_from_path:
        return _named_copy(trainer.resume_from_path.rstrip("/"))
    path = Path(trainer.resume_from_path).expanduser()
    if (path / STATE).is_file():
        return path
    nearby = (match for folder in (path, path.parent) for match in folder.glob(f"{PREFIX}*"))
    raise _no_checkpoint(path, STATE, (match.name for match in nearby if match.is_dir()))


def _named_copy(url: str) -> str:
    names = RemoteFolder(url).names()
    if MANIFEST in names:
        return url
    nearby = [*names, *RemoteFolder(url.rpartition("/")[0]).names()]
    raise _no_checkpoint(url, MANIFEST, (name for name in nearby if name.startswith(PREFIX)))


def load_checkpoint(path: Path, learner: Loadable) -> dict[str, JsonValue]:
    """Restore the learner from a checkpoint folder and return the loop's state.

    Raises CHECKPOINT_CORRUPT when its files differ from those that were saved, and INVALID_REQUEST when they are intact
    but belong to another model.
    """
    damage = find_damage(path)
    if damage is not None:
        raise _corrupt(path, damage)
    try:
        state = json.loads((path / STATE).read_text())
        learner.load(path / "actor")
    except NotFiniteError as error:
        raise _corrupt(path, str(error)) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise not_loaded(path, error) from error
    return state


def not_loaded(path: Path, error: Exception) -> TrackwayError:
    """The error for an intact checkpoint that cannot be loaded. Names the release that saved it if it is another."""
    saved = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    message = f"the checkpoint {path} cannot be loaded: {error}"
    if (saved.release, saved.format) != (RELEASE, FORMAT):
        message += (
            f"; it was saved by release {saved.release} (format {saved.format}), and this is release {RELEASE} "
            f"(format {FORMAT}): resume it with the release that saved it, or export it there (trackway export) and "
            "start a run from that model"
        )
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)


def finished_trajectories(path: Path) -> tuple[Trajectory, ...]:
    """The trajectories of a checkpoint that were not trained before it was saved."""
    file = path / FINISHED
    return tuple(read_trajectories(file)) if file.is_file() else ()


def find_damage(path: Path) -> str | None:
    """The first difference between a checkpoint's files and its digests, or None without a difference."""
    for name in (STATE, MANIFEST):
        if not (path / name).is_file():
            return f"{name}: expected a file, got none"
    try:
        manifest = Manifest.model_validate_json((path / MANIFEST).read_bytes())
    except ValidationError as error:
        return f"{MANIFEST}: expected digests of files, got {error.error_count()} errors in it"
    try:
        difference = find_difference(path, manifest.files)
    except OSError as error:
        if error.errno != errno.EIO:  # a bad block; other errors may be transient
            raise
        return f"{error.filename}: {error.strerror}"
    if difference is None:
        return None
    return f"{difference.file}: expected sha256 {difference.expected}, got {difference.got}"


def set_aside_damaged(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is no longer found, and return its new path. Raises StorageError."""
    name = f"{DAMAGED}{path.name.removeprefix(REPLACED)}"
    names = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    aside = next(folder for candidate in names if not (folder := path.with_name(candidate)).exists())
    with writing(aside, f"the new name of {path.name}"):
        path.rename(aside)
        _sync_one(aside.parent)
    return aside


def _no_checkpoint(path: Path | str, file: str, nearby: Iterable[str]) -> TrackwayError:
    names = sorted(nearby)
    hint = f"; near it are {', '.join(names)}" if names else ""
    return _refused(f"expected a checkpoint, .../global_step_<n> with a {file}, got {path}{hint}")


def _corrupt(path: Path | str, damage: str) -> TrackwayError:
    return TrackwayError(
        ErrorCode.CHECKPOINT_CORRUPT, f"the checkpoint {path} is damaged: {damage}", path=str(path), damage=damage
    )


def _refused(reason: str) -> TrackwayError:
    return TrackwayError(
        ErrorCode.INVALID_REQUEST, f"trainer.resume_from_path: {reason}", key="trainer.resume_from_path"
    )


def _put(making: Path, folder: Path) -> None:
    """Rename into place. An older checkpoint of the same step can be found until then."""
    if folder.exists():
        _set_aside(folder)
    making.rename(folder)
    _sync_one(folder.parent)


def _write_latest(root: Path, step: int) -> None:
    with replacing(root / LATEST) as draft:
        draft.write_text(str(step))
        _sync_one(draft)
    _sync_one(root)


def _manifest(folder: Path) -> Manifest:
    files = digests(folder, [path for path in folder.rglob("*") if path.is_file()])
    return Manifest(files=files, release=RELEASE, format=FORMAT)


def _steps(root: Path) -> list[int]:
    return _numbers(folder.name for folder in root.glob(f"{PREFIX}*") if folder.is_dir())


def _numbers(names: Iterable[str]) -> list[int]:
    """The steps of names such as `global_step_4`, in order. Other names are left out."""
    steps = (name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX))
    return sorted(int(step) for step in steps if step.isdecimal())


def _prune(root: Path, latest: int, keep: int) -> None:
    others = [step for step in _steps(root) if step != latest]
    for step in others[: max(0, len(others) - (keep - 1))]:
        _set_aside(root / f"{PREFIX}{step}")


def _set_aside(folder: Path) -> None:
    """Rename a folder before its removal, so that a partly removed checkpoint is never found."""
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
    """Flush everything under a folder to disk."""
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
