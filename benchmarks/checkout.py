"""Measuring Trackway of another checkout, and Ray's workers at the niceness of the command."""

import os
import sys
from argparse import ArgumentParser
from pathlib import Path

HELP = "measure Trackway of this checkout, with its own .venv if it has one"


def interpreter(checkout: Path) -> tuple[str, str]:
    """Python and PYTHONPATH for the Trackway of a checkout. ValueError for a folder that is none."""
    parts = [checkout.resolve() / part for part in ("services", "clients", "deploy")]
    absent = [str(part) for part in parts if not (part / "trackway").is_dir()]
    if absent:
        raise ValueError(f"expected the root of a checkout of Trackway, got {checkout}, without {', '.join(absent)}")
    own = checkout.resolve() / ".venv" / "bin" / "python"
    return str(own) if own.exists() else sys.executable, os.pathsep.join(map(str, parts))


def run_in(checkout: Path | None, parser: ArgumentParser) -> None:
    """Start this command again on the Trackway of `checkout`, unless it is None or this is the second start.

    Ray's workers get no niceness beyond the command's own (Ray's default is 15), so that all contenders are equal.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    if checkout is None:
        return
    try:
        python, path = interpreter(checkout)
    except ValueError as error:
        parser.error(f"--checkout: {error}")
    if os.environ.get("PYTHONPATH", "") != path:
        os.execve(python, [python, *sys.argv], {**os.environ, "PYTHONPATH": path})
