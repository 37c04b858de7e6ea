"""Contents of an outputs folder, by whether they can be made again, and their removal."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from trackway.deploy.deployment.record import find_running
from trackway.system.user_error import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.heartbeat import LivenessMonitor
from trackway.wire.trainer import ENDED

_REMADE = {"weights": "published weights, which a run publishes again", ".deployment": "logs of services"}
_KEPT = {"mlflow": "metrics and traces", "spool": "traces and metrics not delivered yet"}


@dataclass(frozen=True)
class Part:
    """A file or folder of an outputs folder."""

    path: Path
    what: str
    size: int
    """Bytes."""


def parts(outputs: Path, everything: bool) -> list[Part]:
    """Files that `clean` removes: those that can be made again; with `everything` also runs, metrics and traces.

    Raises:
        UserError: the folder belongs to no deployment, or services or a run use it.
    """
    runs = [RunFolder(path) for path in _inside(outputs) if RunFolder(path).exists]
    if not runs and not (outputs / ".deployment").is_dir():  # other folders may have `weights` of their own
        raise UserError(f"expected an outputs folder of trackway, got {outputs}; give --outputs")
    running = find_running(outputs)
    if running is not None:
        raise UserError(f"services use {outputs}; stop them first: `trackway down --outputs {outputs}`")
    active = [run.name for run in runs if run.info().state not in ENDED and LivenessMonitor().alive(run)]
    if active:
        raise UserError(f"run {active[0]} is active in {outputs}; stop it first")
    found = [(outputs / name, what) for name, what in _REMADE.items()]
    found += [(path, "damaged checkpoint") for run in runs for path in sorted(run.checkpoints.glob("damaged_*"))]
    if everything:
        found = [(outputs / name, what) for name, what in {**_REMADE, **_KEPT}.items()]
        found += [(run.path, "a run, with its checkpoints") for run in runs]
    return [Part(path, what, _size(path)) for path, what in found if path.exists()]


def remove(found: list[Part]) -> None:
    """Remove the parts."""
    for part in found:
        if part.path.is_dir() and not part.path.is_symlink():
            shutil.rmtree(part.path)
        else:
            part.path.unlink(missing_ok=True)


def _inside(outputs: Path) -> list[Path]:
    return sorted(outputs.iterdir()) if outputs.is_dir() else []


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    return path.lstat().st_size
