"""Describe the Python installation of a process, and compare two installations.

A worker with another Python or other packages than the driver fails late and with misleading errors.
"""

import os
import platform
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trackway.wire.health import Installation

COMPARED_PACKAGES = (
    *("trackway", "ray", "pydantic", "fastapi", "httpx", "torch", "transformers", "tokenizers", "safetensors"),
    *("opentelemetry-sdk", "numpy"),
)
"""Packages whose mismatch breaks a deployment, or silently corrupts a run."""

REMEDY = (
    "start both from one environment (no other PYTHONPATH, no runtime_env.py_executable), or install the same versions"
)


@cache
def installation() -> Installation:
    """The installation of this process."""
    versions = {name: installed for name in COMPARED_PACKAGES if (installed := _version(name)) is not None}
    return Installation(python=platform.python_version(), executable=sys.executable, versions=versions)


def difference(expected: Installation, got: Installation) -> str:
    """The differences, with both sides. Empty if there are none. Aliases of an interpreter in a folder are equal."""
    differences = []
    if _interpreter(expected) != _interpreter(got):
        ours, theirs = f"{expected.executable} ({expected.python})", f"{got.executable} ({got.python})"
        differences.append(f"Python: expected {ours}, got {theirs}")
    for package in sorted(expected.versions.keys() | got.versions.keys()):
        ours, theirs = expected.versions.get(package, "none"), got.versions.get(package, "none")
        if ours != theirs:
            differences.append(f"{package}: expected {ours}, got {theirs}")
    return "; ".join(differences)


def _interpreter(installation: Installation) -> tuple[Path, str]:
    return Path(os.path.normpath(installation.executable)).parent, installation.python


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
