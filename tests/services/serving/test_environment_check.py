"""Two processes that must run on the same: what differs is named with both sides."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from trackway.serving.app import difference, installation
from trackway.wire.service import Installation

SAY = "from trackway.serving.app import installation; print(installation().model_dump_json())"


def said_by(python: Path) -> Installation:
    told = subprocess.run([python, "-c", SAY], capture_output=True, text=True, timeout=60, check=True).stdout
    return Installation.model_validate_json(told)


def test_a_process_of_another_environment_is_told_by_interpreter_and_package(other_environment: Path) -> None:
    ours, theirs = installation(), said_by(other_environment)

    assert difference(ours, said_by(Path(sys.executable))) == ""
    assert difference(ours, theirs) == (
        f"Python: expected {ours.executable} ({ours.python}), got {other_environment} ({ours.python}); "
        f"pydantic: expected {version('pydantic')}, got 2.0.1"
    )


def test_another_name_of_the_same_interpreter_and_a_package_on_one_side_only() -> None:
    ours = installation()
    bare = ours.versions.copy()
    del bare["numpy"]

    renamed = ours.model_copy(update={"executable": str(Path(ours.executable).with_name("python3")), "versions": bare})

    assert difference(ours, renamed) == f"numpy: expected {ours.versions['numpy']}, got none"
    assert difference(renamed, ours) == f"numpy: expected none, got {ours.versions['numpy']}"
