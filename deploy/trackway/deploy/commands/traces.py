"""`trackway traces list | show | compare | verify`: find, draw, compare and check trajectory traces."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.terminal.progress import print_json, stderr, stdout
from trackway.system.process import Experimental, UserError, warn_experimental
from trackway.traces import refs, render
from trackway.traces.compare import compare
from trackway.traces.mlflow_store import MlflowStore
from trackway.traces.store import Steps, TraceFilter, TraceKind, TraceStore
from trackway.traces.weave_store import WeaveStore
from trackway.tracing import TracingSettings
from trackway.tracing.local_mlflow import client as local_mlflow

if TYPE_CHECKING:
    from trackway.traces.verify import Meter


def store_uri(outputs: Path, explicit: str | None = None, fallback: str | None = None) -> str:
    """The MLflow URI to read from. The first that exists of: `explicit`; the outputs folder's MLflow (the running
    server, or its database); `fallback`; MLFLOW_TRACKING_URI.

    Raises:
        UserError: there is none.
    """
    deployment = Deployment.load(outputs.resolve())
    if explicit is None and deployment and deployment.mlflow_uri and (deployment.attached or deployment.started_here):
        return deployment.mlflow_uri
    database = outputs.resolve() / "mlflow" / "mlflow.db"
    stored = f"sqlite:///{database}" if database.is_file() else None
    uri = explicit or stored or fallback or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            f"no MLflow database in {outputs}; set --outputs to the folder of a deployment or demo, or --mlflow-uri"
        )
    return uri


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
Experiment = Annotated[
    str | None, typer.Option("--run", "--experiment-name", metavar="RUN", help="Name of the run, a tag of its traces.")
]
Validate = Annotated[bool | None, typer.Option("--validate/--train", help="Only validation or only training.")]


def open_store(
    backend: Backend, outputs: Path, project: str | None, mlflow_uri: str | None, fallback: str | None = None
) -> TraceStore:
    """The store selected by the options. `fallback` is the MLflow URI used when the outputs folder has no MLflow.

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


def wide_enough() -> Console:
    """A console on standard output. For a pipe, rich would assume 80 columns, too narrow for a tree."""
    return Console(width=None if stdout.is_terminal or "COLUMNS" in os.environ else _PIPE_WIDTH)


@contextmanager
def meter(quiet: bool) -> "Iterator[Meter]":
    """Show a progress bar on standard error, except with `quiet` or without a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=stderr, transient=True, disable=quiet or not stderr.is_terminal) as progress:
        task = progress.add_task("traces", total=0)
        yield lambda known, checked: progress.update(task, total=known, advance=checked)


_MOST_LOOKED_AT = 200
"""Traces looked at for the names of the runs."""

app = typer.Typer(no_args_is_help=True)


@app.command("list")
def traces_list(
    step: Annotated[str | None, typer.Option(help="Step or range of steps: 3, 3-7, 3-.")] = None,
    sample_index: Annotated[str | None, typer.Option(help="Row of the dataset: its `extra_info.index`.")] = None,
    rollout_n: Annotated[int | None, typer.Option(help="Index of the rollout in its group.")] = None,
    validate: Validate = None,
    experiment_name: Experiment = None,
    outcome: Annotated[str | None, typer.Option(help="ok, retried, aborted, 'error:*', ...")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="key=value, where * matches any text; repeatable.")] = None,
    span: Annotated[str, typer.Option(help="Name of a span, a framework's too, where * matches any text.")] = "",
    reward_min: Annotated[float | None, typer.Option(help="Minimum reward.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Maximum reward.")] = None,
    kind: Annotated[TraceKind, typer.Option(help="Trajectories or training steps.")] = TraceKind.TRAJECTORY,
    limit: Annotated[int, typer.Option(min=1, max=10000)] = 50,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the rows of the list")] = False,
) -> None:
    """List traces by tag, step and reward, the newest first.

    Example: trackway traces list --step 3-7 --outcome 'error:*' --outputs outputs/demo
    """
    named = {
        "sample_index": sample_index,
        "rollout_n": rollout_n,
        "validate": validate,
        "experiment_name": experiment_name,
        "outcome": outcome,
    }
    tags = {key: str(value) for key, value in named.items() if value is not None}
    steps = None if step is None else Steps.parse(step)
    wanted = TraceFilter(kind, {**tags, **tags_of(tag or [])}, steps, reward_min, reward_max, span)
    store = open_store(backend, outputs, project, mlflow_uri)
    matches = [render.row(tree) for tree in islice(store.search(wanted), limit + 1)]
    if not matches and experiment_name is not None:
        raise UserError(_no_experiment(store, kind, experiment_name))
    if as_json:
        print_json([row.model_dump(mode="json") for row in matches[:limit]])
        return
    console = wide_enough()
    console.print(render.listing(matches[:limit], console.width))
    more = " (more exist: raise --limit)" if len(matches) > limit else ""
    console.print(f"{min(len(matches), limit)} traces{more}", highlight=False)


def _no_experiment(store: TraceStore, kind: TraceKind, name: str) -> str:
    """Why a search with --run found nothing: the name, or the other options."""
    newest = islice(store.search(TraceFilter(kind)), _MOST_LOOKED_AT)
    names = sorted({tree.tags.get("experiment_name", "") for tree in newest})
    if name in names:
        return f"no trace of --run {name} matches the other options; leave one out"
    for other in {*TraceKind} - {kind}:
        if next(iter(store.search(TraceFilter(other, {"experiment_name": name}))), None) is not None:
            return f"--run: expected a {kind} of {name}, got traces of the kind {other} alone; add --kind {other}"
    known = ", ".join(names) or "none"
    return f"--run: expected a run with traces (the newest are of {known}), got {name!r}"


@app.command("show")
def traces_show(
    trace: Annotated[str, typer.Argument(help="tr-<hex>, its first 6 or more digits, or a name such as s3/i17/n2.")],
    experiment_name: Experiment = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts and stack traces.")] = False,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the trace as a tree of spans")] = False,
) -> None:
    """Draw one trajectory: spans, texts, tool calls, rewards.  Example: trackway traces show s3/i17/n2"""
    tree = refs.resolve(open_store(backend, outputs, project, mlflow_uri), trace, experiment_name)
    if as_json:
        print_json(tree)
        return
    console = wide_enough()
    console.print(render.draw(tree, render.Style(console.width, full)))


@app.command("compare")
def traces_compare(
    traces: Annotated[list[str] | None, typer.Argument(help="Two traces or more, as in `show`.")] = None,
    sample_index: Annotated[str | None, typer.Option(help="Row of the dataset, in place of traces.")] = None,
    steps: Annotated[str | None, typer.Option(help="Steps of the sample: 1,10 or 1-5.")] = None,
    step: Annotated[int | None, typer.Option(help="Step of the sample, with --rollouts.")] = None,
    rollouts: Annotated[str | None, typer.Option(help="Rollouts of the group: 0,2 or 0-7.")] = None,
    rollout_n: Annotated[int, typer.Option(help="Rollout of the sample, with --steps.")] = 0,
    validate: Validate = None,
    experiment_name: Experiment = None,
    html: Annotated[Path | None, typer.Option(help="Write the comparison as one HTML file.")] = None,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the trajectories and their differences")] = False,
) -> None:
    """Show trajectories side by side: facts, and with --html texts and tool calls.

    Example: trackway traces compare --step 1 --sample-index 7 --rollouts 0-7 --html compare.html
    """
    choice = refs.CompareOptions(sample_index, steps, step, rollouts, rollout_n, bool(validate))
    references = choice.references(traces or [])
    store = open_store(backend, outputs, project, mlflow_uri)
    comparison = compare([refs.resolve(store, reference, experiment_name) for reference in references])
    if html is not None:
        from trackway.traces import page

        page.write(html, comparison)
    if as_json:
        print_json(comparison)
    elif html is not None:
        stdout.print(Text(str(html)), soft_wrap=True)
    else:
        wide_enough().print(render.facts(comparison))
        stderr.print("the texts side by side: --html FILE", highlight=False)


@app.command("verify")
def traces_verify(
    step: Annotated[str | None, typer.Option(help="Step or range of steps: 3, 3-7, 3-; default all.")] = None,
    validate: Validate = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Name of the run; default the latest that trained.")
    ] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for late spans.")] = 10.0,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the counts, and each trace with its gaps")] = False,
) -> None:
    """Check that each traced trajectory of a run has a complete trace. Exit status 1 if any trace has gaps.

    Example: trackway traces verify --step 3 --outputs outputs/demo
    """
    from trackway.deploy.runs.found import find_run
    from trackway.traces.verify import dumps, verify

    found = find_run(outputs, run)
    folder = found.folder
    files = dumps(folder, None if step is None else Steps.parse(step), validate)
    store = open_store(backend, found.outputs, project, mlflow_uri, fallback=found.info.mlflow_uri)
    with meter(as_json) as shown:
        verification = verify(store, folder, files, wait, shown)
    if as_json:
        print_json(verification)
    else:
        wide_enough().print(render.verification(verification))
    if verification.gaps:
        raise typer.Exit(1)
