"""Options shared by the `trackway traces` commands, and the trace store they select."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from trackway.deploy.deployment.mlflow_uri import store_uri
from trackway.deploy.terminal.console import stderr, stdout
from trackway.system.experimental import Experimental, warn_experimental
from trackway.system.user_error import UserError
from trackway.traces.mlflow_store import MlflowStore
from trackway.traces.store import TraceStore
from trackway.traces.weave_store import WeaveStore
from trackway.tracing import TracingSettings
from trackway.tracing.local_mlflow import client as local_mlflow

if TYPE_CHECKING:
    from trackway.traces.verify import Meter

_PIPE_WIDTH = 120


class Backend(StrEnum):
    """Backend that traces are read from."""

    MLFLOW = "mlflow"
    WEAVE = "weave"


_BACKEND = f"Backend that has the traces. `weave` is experimental: {Experimental.WANDB}."
BackendOption = Annotated[Backend, typer.Option("--backend", help=_BACKEND)]
Project = Annotated[str | None, typer.Option(help="MLflow experiment (default all), or Weave entity/project.")]
MlflowUri = Annotated[
    str | None,
    typer.Option(help="MLflow URI; default the MLflow of --outputs, else MLFLOW_TRACKING_URI.", show_default=False),
]
Experiment = Annotated[str | None, typer.Option("--experiment-name", help="Name of the run.")]
Validate = Annotated[bool | None, typer.Option("--validate/--train", help="Only validation or only training.")]
Width = Annotated[int | None, typer.Option(min=60, max=1000, help="Width in columns; default the terminal's, or 120.")]


def open_store(
    backend: Backend, outputs: Path, project: str | None, mlflow_uri: str | None, fallback: str | None = None
) -> TraceStore:
    """The store selected by the options; `fallback` is the MLflow URI used when the outputs folder has no MLflow.

    Raises:
        UserError: no store is configured, or its package is not installed.
    """
    try:
        if backend is Backend.MLFLOW:
            uri = store_uri(outputs, mlflow_uri, fallback)
            if uri.startswith("sqlite:") and not local_mlflow.answers(uri):
                stops = f"it stops {local_mlflow.LINGER_S:.0f} s after its last use"
                stderr.print(f"starting MLflow for {uri}; {stops}", soft_wrap=True, highlight=False)
            return MlflowStore.open(uri, project)
        if project is None:
            raise UserError("--backend weave: expected --project entity/project, got none; give --project")
        if TracingSettings().weave_is_hosted:
            warn_experimental(Experimental.WANDB)
        return WeaveStore.open(project)
    except ModuleNotFoundError as error:
        message = f"--backend {backend.value} needs the package {error.name}: pip install 'trackway[{backend.value}]'"
        raise UserError(message) from error


def tags_of(pairs: list[str]) -> dict[str, str]:
    """Parses `key=value` pairs. Raises UserError for any other form."""
    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"--tag: expected key=value, got {wrong[0]!r}; write e.g. --tag step=3")
    return dict(pair.split("=", 1) for pair in pairs)


def wide_enough(width: int | None) -> Console:
    """A console on standard output. For a pipe, rich would assume 80 columns, too narrow for a tree."""
    return Console(width=width or (None if stdout.is_terminal else _PIPE_WIDTH))


class _Bar:
    """A progress bar whose total grows as more traces are found."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("traces", total=0)
        self._total = 0

    def expect(self, count: int) -> None:
        """See `verify.Meter`."""
        self._total += count
        self._progress.update(self._task, total=self._total)

    def advance(self, count: int) -> None:
        """See `verify.Meter`."""
        self._progress.advance(self._task, count)


@contextmanager
def meter(quiet: bool) -> "Iterator[Meter | None]":
    """A transient progress bar on standard error; None with `quiet` or without a terminal."""
    if quiet or not stderr.is_terminal:
        yield None
        return
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=stderr,
        transient=True,
    ) as progress:
        yield _Bar(progress)
