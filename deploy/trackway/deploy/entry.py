"""How a command of ours begins and ends: user errors become one line and exit status 2."""

import os
import signal
import sys
from typing import NoReturn

import typer
from rich.markup import escape

from trackway.deploy.console import stderr
from trackway.deploy.errors import UserError
from trackway.wire.errors import TrackwayError


def enter(app: typer.Typer) -> NoReturn:
    """Run a command line and end the process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        status = app(standalone_mode=False)
    except (UserError, TrackwayError) as error:
        stderr.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        stderr.print("stopped")
        sys.exit(130)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except Exception as error:
        # typer's own parse errors know how to show themselves; click is typer's private detail.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()  # pyright: ignore[reportAttributeAccessIssue]
            sys.exit(2)
        raise
    sys.exit(status if isinstance(status, int) else 0)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
