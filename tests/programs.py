"""Programs that some tests run and pip cannot install.

`python tests/programs.py` installs the missing ones: as root by apt; for other users it prints the command. It needs
only the standard library and always exits with status 0, since a test whose program is missing is skipped.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

PACKAGES = {
    "bwrap": "bubblewrap",  # isolates model-written code
    "chromium": "chromium",  # opens the pages that Trackway draws
    "ip": "iproute2",  # network namespaces for clusters of several nodes
    "redis-server": "redis-server",  # state of a Ray head that survives the head
}
"""Debian's package of each program."""
_INSTALL = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
_TIMEOUT_S = 900.0


def missing(path: str | None = None) -> list[str]:
    """Packages whose program is not on `path` (default: this process's PATH)."""
    return [package for program, package in PACKAGES.items() if shutil.which(program, path=path) is None]


def path_without(programs: Iterable[str], path: str, folder: Path) -> str:
    """`path` with the folders that hold one of `programs` replaced by folders of links to everything else in them."""
    hidden = set(programs)
    entries = []
    for index, entry in enumerate(path.split(os.pathsep)):
        if not any((Path(entry) / program).exists() for program in hidden):
            entries.append(entry)
            continue
        links = folder / f"bin{index}"
        links.mkdir()
        for file in Path(entry).iterdir():
            if file.name not in hidden:
                (links / file.name).symlink_to(file)
        entries.append(str(links))
    return os.pathsep.join(entries)


def path_of(program: str, path: str, folder: Path) -> str | None:
    """A folder that holds nothing but a link to `program`; None when `path` lacks it."""
    executable = shutil.which(program, path=path)
    if executable is None:
        return None
    links = folder / f"only-{program}"
    links.mkdir(exist_ok=True)
    link = links / program
    if not link.is_symlink():
        link.symlink_to(executable)
    return str(links)


def install() -> None:
    """Installs what is missing, or prints how; a failure is printed and the tests go on without the program."""
    packages = missing()
    if not packages:
        return
    names = ", ".join(packages)
    if shutil.which("apt-get") is None:
        print(f"not installed: {names}; tests that need them are skipped. Install them with your package manager.")
    elif os.geteuid() != 0:
        command = f"sudo {' '.join(_INSTALL)} {' '.join(packages)}"
        print(f"not installed: {names}; tests that need them are skipped. To install them: {command}")
    else:
        print(f"installing {names}", flush=True)
        problem = _apt(["apt-get", "update", "-qq"]) or _apt([*_INSTALL, *packages])
        if problem:
            print(f"could not install {names}; tests that need them are skipped: {problem}")


def _apt(command: list[str]) -> str | None:
    """The last line of the error; None when the command succeeded."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with tempfile.TemporaryFile("w+") as output:  # apt's grandchildren may outlive it and hold a pipe open
        try:
            status = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=_TIMEOUT_S
            ).returncode
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` did not end within {_TIMEOUT_S:.0f} s"
        output.seek(0)
        lines = output.read().strip().splitlines()
    return None if status == 0 else (lines[-1] if lines else f"`{' '.join(command)}` exited with status {status}")


if __name__ == "__main__":
    sys.exit(install())
