"""Entry and exit of commands: a user error becomes one line and exit status 2."""

import os
import signal
import sys
from pathlib import Path
from types import TracebackType
from typing import NoReturn, get_args

import typer
from rich.markup import escape

from trackway.deploy.terminal.progress import print_json, stderr
from trackway.system import escape_log_records, visible
from trackway.system.files import FULL, NOT_WRITABLE, error_number, storage_error
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError

_EXTRAS = {"config": "trainer", "console": "console", "data": "trainer", "traces": "trainer", "ui": "mlflow"}
"""Extras of commands that need less than all services."""
_ALL = "cpu"


def missing_extra(error: ModuleNotFoundError) -> str | None:
    """Return how to install what the command of this process lacks, in one line.

    None when the module is one of ours, or was imported by other code than ours: no extra would help.
    """
    if error.name is None or error.name.partition(".")[0] == "trackway" or not _imported_by_us(error.__traceback__):
        return None
    from trackway.wire.service import ServiceName  # here, since every command would load the services' wire

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


def enter(app: typer.Typer) -> NoReturn:
    """Run a command line and end the process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    escape_log_records()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = app(standalone_mode=False)
    except (UserError, TrackwayError) as error:
        _refuse(error)
    except KeyboardInterrupt:
        stderr.print("stopped")
        sys.exit(130)
    except ModuleNotFoundError as error:
        message = missing_extra(error)
        if message is None:
            raise
        _refuse(UserError(message))
    except OSError as error:
        number = error_number(error)
        if number in FULL:
            _refuse(storage_error(number, Path(str(error.filename or Path.cwd())), "a file"))
        if number in NOT_WRITABLE and error.filename:
            message = f"expected to use {error.filename}, got '{error.strerror}'; grant access or give another path"
            _refuse(UserError(message))
        raise
    except Exception as error:
        # Typer's parse errors print themselves; their class is click's, which is private to Typer.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()  # pyright: ignore[reportAttributeAccessIssue]
            _print_json_error(UserError(error.format_message()))  # pyright: ignore[reportAttributeAccessIssue]
            sys.exit(2)
        _print_json_error(TrackwayError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
        raise
    sys.exit(status if isinstance(status, int) else 0)  # what typer makes of typer.Exit


def _refuse(error: Exception) -> NoReturn:
    message = visible(str(error), keep="\n")
    stderr.print(f"[red]error:[/] {escape(message)}", soft_wrap=True)
    _print_json_error(error)
    sys.exit(2)


def _print_json_error(error: Exception) -> None:
    """With --json, print the error on standard output in the format of the services."""
    if "--json" not in sys.argv:
        return
    known = error if isinstance(error, TrackwayError) else TrackwayError(ErrorCode.INVALID_REQUEST, str(error))
    print_json(known.to_reply())


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
