"""Which extra of the package a command needs that cannot import a module."""

import sys
from types import TracebackType
from typing import get_args

from trackway.wire.health import ServiceName

_EXTRAS = {"config": "trainer", "console": "console", "data": "trainer", "traces": "trainer", "ui": "mlflow"}
"""Extras of commands that need less than all services."""
_ALL = "cpu"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """How to install what the command of this process lacks, in one line.

    None when the module is one of ours, or was imported by other code than ours: no extra would help.
    """
    if error.name is None or error.name.partition(".")[0] == "trackway" or not _imported_by_us(error.__traceback__):
        return None
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    command = words[0] if words else ""
    served = [word for word in words if command == "serve" and word in get_args(ServiceName)]
    extra = served[0] if served else _EXTRAS.get(command, _ALL)
    name = f"`trackway {command}`" if command else "this command"
    return (
        f"{name}: expected the packages of trackway[{extra}], got no module {error.name!r}; "
        f"install them: pip install 'trackway[{extra}]'"
    )


def _imported_by_us(traceback: TracebackType | None) -> bool:
    module = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        module = module if name.startswith("importlib.") else name
        traceback = traceback.tb_next
    return module.startswith("trackway.")
