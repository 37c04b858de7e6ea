"""Environments of other projects, beside the checkout's own `.venv`, made when a benchmark first needs them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"


class NotMade(Exception):
    """An environment could not be made: expected, got, remedy."""


def pinned(*packages: str) -> list[str]:
    """The packages in the versions of constraints.txt."""
    versions = dict(line.split("==") for line in CONSTRAINTS.read_text().split() if "==" in line)
    return [f"{package}=={versions[package]}" for package in packages]


def environment(
    name: str, requirements: Sequence[str], python: str = sys.executable, options: Sequence[str] = ()
) -> Path:
    """The interpreter of the environment `.venv-NAME`, which is made unless it has these requirements.

    `python` is an interpreter, or a version such as `3.12` that uv finds or fetches. `options` are those of
    `uv pip install`. Raises NotMade.
    """
    folder = ROOT / f".venv-{name}"
    interpreter, made_of = folder / "bin" / "python", folder / "requirements.txt"
    wanted = "\n".join([*requirements, CONSTRAINTS.read_text()])
    if interpreter.exists() and made_of.exists() and made_of.read_text() == wanted:
        return interpreter
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise NotMade(f"expected uv beside {sys.executable} or on PATH, got none; `{sys.executable} -m pip install uv`")
    print(f"making the environment of {name} in {folder} (first time)", file=sys.stderr, flush=True)
    _run([uv, "venv", "--quiet", "--clear", "--python", python, str(folder)])
    install = [uv, "pip", "install", "--quiet", "--python", str(interpreter), "--compile-bytecode"]
    _run([*install, *options, *requirements])
    made_of.write_text(wanted)
    return interpreter


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotMade(
            f"expected `{' '.join(command[:3])}` to make an environment, got status {done.returncode}:\n"
            f"{done.stderr[-1500:]}\nmend that, or leave this contender out"
        )
