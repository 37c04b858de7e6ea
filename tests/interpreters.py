"""Other versions of Python than the one that runs the tests."""

import os
import shutil
import subprocess
from pathlib import Path


def python_of(version: str) -> str | None:
    """An interpreter of that version, on PATH or of pyenv."""
    of_pyenv = sorted(
        Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob(f"versions/{version}.*/bin/python")
    )
    for candidate in [*map(str, of_pyenv), shutil.which(f"python{version}")]:
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None
