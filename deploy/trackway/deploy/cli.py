"""The `trackway` command: five services that train a tool-using agent, every trajectory one trace."""

import os
import signal
import sys

import typer
from rich.markup import escape

from trackway.deploy.commands import data, services, tools, traces, training
from trackway.deploy.console import stderr
from trackway.deploy.errors import UserError
from trackway.wire.errors import TrackwayError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(services.app)
app.add_typer(training.app)
app.add_typer(data.app, name="data")
app.add_typer(tools.app, name="tools")
app.add_typer(traces.app, name="traces")


def main() -> None:
    """Entry point: user errors become one line and exit status 2."""
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


if __name__ == "__main__":
    main()
