"""ATIF documents of a run's trajectories: Harbor's validator accepts them, and they read back as they were."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from trackway.trainer.run_state.atif import read_atif
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.trainer.run_state.trajectory_export import export_trajectories, source_of


def harbors_errors(documents: Iterable[Path]) -> dict[Path, list[str]]:
    """The errors of Harbor's validator for each document that it refuses."""
    with pytest.MonkeyPatch.context() as environment:
        environment.syspath_prepend(Path(sys.prefix) / "harbor")  # where the Makefile installs it, without dependencies
        validator = importlib.import_module("harbor.utils.trajectory_validator").TrajectoryValidator()
    return {file: [*validator.errors] for file in documents if not validator.validate(file) or validator.errors}


def read_back(run: RunFolder, folder: Path) -> int:
    """Export every stored trajectory of a run to `folder` and read it back, equal. Return their number."""
    count = 0
    for validation in (False, True):
        source, target = source_of(run, None, validation), folder / ("val" if validation else "train")
        stored = [trajectory for file in source.files for trajectory in read_trajectories(file)]
        exported = export_trajectories(source, "atif", target)
        documents = sorted(target.rglob("*.json"), key=lambda file: file.name)
        assert harbors_errors(documents) == {}
        assert [read_atif(file) for file in documents] == stored
        assert exported.trajectories == len(stored)
        count += len(stored)
    return count
