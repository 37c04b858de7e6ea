"""Entry and exit of commands: a user error becomes one line and exit status 2."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

import typer
from rich.markup import escape

from trackway.deploy.terminal.progress import print_json, stderr
from trackway.system import escape_log_records, visible
from trackway.system.storage import FULL, NOT_WRITABLE, error_number, storage_error
from trackway.system.user_error import UserError
from trackway.wire.errors import ErrorCode, TrackwayError


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
        from trackway.deploy.terminal.extras import missing_extra

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
