"""What a process runs on, and how two that must be alike differ.

People have lost days to workers that ran on another Python, or other packages, than the ones they had prepared.
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
"""Those whose mismatch breaks a deployment, or a run in silence."""

REMEDY = (
    "start both from one environment (no other PYTHONPATH, no runtime_env.py_executable), or install the same versions"
)


@cache
def installation() -> Installation:
    """That of this process."""
    versions = {name: found for name in COMPARED_PACKAGES if (found := _version(name)) is not None}
    return Installation(python=platform.python_version(), executable=sys.executable, versions=versions)


def difference(expected: Installation, got: Installation) -> str:
    """What differs, each with both sides; empty when nothing does. Names of one interpreter in its folder are alike."""
    differences = []
    if _interpreter(expected) != _interpreter(got):
        ours, theirs = f"{expected.executable} ({expected.python})", f"{got.executable} ({got.python})"
        differences.append(f"Python: expected {ours}, got {theirs}")
    for package in sorted(expected.versions.keys() | got.versions.keys()):
        ours, theirs = expected.versions.get(package, "none"), got.versions.get(package, "none")
        if ours != theirs:
            differences.append(f"{package}: expected {ours}, got {theirs}")
    return "; ".join(differences)


def _interpreter(one: Installation) -> tuple[Path, str]:
    return Path(os.path.normpath(one.executable)).parent, one.python


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
