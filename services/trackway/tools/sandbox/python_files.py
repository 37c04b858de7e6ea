"""The files of the machine that a Python interpreter needs."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
_DESCRIBE = """
import json, os, site, sys, sysconfig
print(json.dumps({
    "base": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "prefix": sys.prefix,
    "base_prefix": sys.base_prefix,
    "packages": [*site.getsitepackages(), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")],
}))
"""


@dataclass(frozen=True)
class PythonFiles:
    """An interpreter and the paths that it reads.

    arguments: its command line up to the program.
    executables: every name of the executable on the way through links, beside the real file.
    visible: folders, files and links it needs, at their own paths.
    hidden: folders within them that stay empty.
    """

    arguments: tuple[str, ...]
    executables: tuple[tuple[str, str], ...]
    visible: tuple[str, ...]
    hidden: tuple[str, ...]


def python_files(python: str | None) -> PythonFiles:
    """The files of an interpreter with its packages, or of the one that runs this process, without any package.

    ValueError when `python` cannot be run.
    """
    started = os.path.abspath(python) if python else os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    description = _described(started)
    base_prefix = str(description["base_prefix"])
    visible = [*_SYSTEM_LIBRARIES, f"{base_prefix}/lib", f"{base_prefix}/lib64"]
    if description["prefix"] != base_prefix:
        visible.append(str(description["prefix"]))
    return PythonFiles(
        arguments=(started, "-I", "-X", "utf8") if python else (started, "-I", "-S", "-X", "utf8"),
        executables=tuple((str(description["base"]), name) for name in _names(started)),
        visible=tuple(dict.fromkeys(path for path in visible if os.path.lexists(path))),
        hidden=() if python else tuple(sorted({path for path in description["packages"] if Path(path).is_dir()})),
    )


def _described(python: str) -> dict[str, str | list[str]]:
    try:
        described = subprocess.run(
            [python, "-I", "-c", _DESCRIBE], capture_output=True, text=True, timeout=60, check=True, env={}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ValueError(f"expected `python` to be the path of a Python interpreter, got {python!r}") from error
    return json.loads(described.stdout)


def _names(executable: str) -> list[str]:
    names = [executable]
    while os.path.islink(names[-1]):
        names.append(os.path.normpath(os.path.join(os.path.dirname(names[-1]), os.readlink(names[-1]))))
    return names
