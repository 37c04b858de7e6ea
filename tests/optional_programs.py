"""pytest plugin: a test sees a program of `programs.PACKAGES` only if it is marked `program("name")`.

A test that runs such a program without the mark fails on every machine, not only where the program is missing. A marked
test is skipped where it is missing; `program("name", optional=True)` shows it where it is installed and never skips.
"""

import collections
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import PACKAGES, path_of, path_without

_INSTALLED_PATH = "TRACKWAY_TEST_PATH"
"""The PATH that pytest was started with; xdist's workers are started with the reduced one."""
REPORT = "TRACKWAY_TEST_REPORT"
"""A file to which each pytest process appends its counts as a line of JSON."""
_FOLDER = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOLDER] = Path(tempfile.mkdtemp(prefix="trackway-programs-"))
    installed = os.environ.setdefault(_INSTALLED_PATH, os.environ["PATH"])
    if not hasattr(config, "workerinput"):
        os.environ["PATH"] = path_without(PACKAGES, installed, config.stash[_FOLDER])


def pytest_unconfigure(config: pytest.Config) -> None:
    os.environ["PATH"] = os.environ[_INSTALLED_PATH]
    if not hasattr(config, "workerinput"):
        del os.environ[_INSTALLED_PATH]
    shutil.rmtree(config.stash[_FOLDER])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Around the fixtures too: one of a whole module starts within its first test."""
    reduced = os.environ["PATH"]
    folders = [path_of(name, os.environ[_INSTALLED_PATH], item.config.stash[_FOLDER]) for name in _programs(item)]
    os.environ["PATH"] = os.pathsep.join([*filter(None, folders), reduced])
    try:
        return (yield)
    finally:
        os.environ["PATH"] = reduced


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, optional in _programs(item).items():
        if not optional and shutil.which(name) is None:
            pytest.skip(f"{PACKAGES[name]} is not installed")


def _programs(item: pytest.Item) -> dict[str, bool]:
    """Name and whether every mark of it is optional; raises KeyError for a program that `PACKAGES` lacks."""
    programs: dict[str, bool] = {}
    for mark in item.iter_markers("program"):
        name = mark.args[0]
        if name not in PACKAGES:
            raise KeyError(name)
        programs[name] = programs.get(name, True) and mark.kwargs.get("optional", False)
    return programs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """For the last line of `make test`, which adds up several pytest processes; xdist's workers report to theirs."""
    file = os.environ.get(REPORT)
    if file and not hasattr(config, "workerinput"):
        stats = terminalreporter.stats
        reasons = collections.Counter(_reason(report) for report in stats.get("skipped", []))
        counts = {name: len(stats.get(name, [])) for name in ("passed", "failed", "error")}
        with open(file, "a") as reports:
            reports.write(json.dumps({**counts, "skipped": reasons}) + "\n")


def _reason(report: pytest.TestReport) -> str:
    """The first clause of why a test was skipped."""
    assert isinstance(report.longrepr, tuple)
    return re.split(r"[;:,]\s", report.longrepr[2].removeprefix("Skipped: "), maxsplit=1)[0]
