"""The version of own code: of which files it is, and that it changes with them."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from trackway.serving.user_code import version_of
from trackway.wire.service import OwnCode


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "my_agent"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tools.py").write_text("X = 1")
    (package / "notes.txt").write_text("not code")
    (tmp_path / "single.py").write_text("Y = 1")
    (tmp_path / "rewards.py").write_text("Z = 1")
    return tmp_path


def version(project: Path, *modules: str) -> OwnCode:
    found = version_of(modules, project, [project / "rewards.py", project / "gone.yaml"])
    assert found is not None
    return found


def test_it_is_of_whole_packages_single_modules_and_files(project: Path) -> None:
    code = version(project, "my_agent.tools", "single", "no_such_module")

    assert code.files == ["my_agent/__init__.py", "my_agent/tools.py", "rewards.py", "single.py"]
    assert code.modules == ["my_agent.tools", "single", "no_such_module"]
    assert (len(code.digest), code.commit) == (16, "")


def _edit(project: Path) -> None:
    (project / "my_agent" / "tools.py").write_text("X = 2")


def _add(project: Path) -> None:
    (project / "my_agent" / "new.py").write_text("")


def _rename(project: Path) -> None:
    (project / "my_agent" / "tools.py").rename(project / "my_agent" / "other.py")


def _reward(project: Path) -> None:
    (project / "rewards.py").write_text("Z = 2")


@pytest.mark.parametrize("change", [_edit, _add, _rename, _reward])
def test_it_changes_with_each_file(project: Path, change: Callable[[Path], None]) -> None:
    before = version(project, "my_agent").digest

    change(project)

    assert version(project, "my_agent").digest != before


def test_it_does_not_change_with_the_folder_or_with_other_files(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = version(project, "my_agent").digest
    (project / "my_agent" / "notes.txt").write_text("other")
    moved = tmp_path_factory.mktemp("elsewhere") / "project"

    project.rename(moved)

    assert version(moved, "my_agent").digest == before


def test_a_module_that_is_installed_is_found_without_a_folder() -> None:
    code = version_of(["yaml"], None, [])

    assert code is not None
    assert "yaml/__init__.py" in code.files


def test_without_own_code_there_is_none() -> None:
    assert version_of([], None, []) is None
    assert version_of(["sys"], None, []) is None


def test_the_commit_says_whether_files_differ_from_it(project: Path) -> None:
    def git(*words: str) -> str:
        identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
        return subprocess.run(
            ["git", "-C", str(project), *identity, *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")

    assert version(project, "my_agent").commit == commit
    _edit(project)
    assert version(project, "my_agent").commit == f"{commit}+changes"
