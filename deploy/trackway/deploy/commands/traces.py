"""`trackway traces list | show | compare | verify`: trajectories' traces, found, drawn, compared and checked."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from trackway.deploy.commands.options import OUTPUTS, Json, Outputs
from trackway.deploy.commands.trace_options import (
    Backend,
    BackendOption,
    Experiment,
    MlflowUri,
    Project,
    Validate,
    Width,
    meter,
    open_store,
    tags_of,
    wide_enough,
)
from trackway.deploy.terminal.console import print_json, stdout
from trackway.traces import columns, refs, render, rows, tables
from trackway.traces.compare import compare
from trackway.traces.store import Steps, TraceFilter, TraceKind

app = typer.Typer(no_args_is_help=True, help="Find, draw, compare and check trajectories' traces.")


@app.command("list")
def traces_list(
    step: Annotated[str | None, typer.Option(help="Step, or a range of them: 3, 3-7, 3-.")] = None,
    sample_index: Annotated[str | None, typer.Option(help="Row of the dataset: its `extra_info.index`.")] = None,
    rollout_n: Annotated[int | None, typer.Option(help="Number within the group.")] = None,
    validate: Validate = None,
    experiment_name: Experiment = None,
    outcome: Annotated[str | None, typer.Option(help="ok, retried, aborted, 'error:*', ...")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="key=value; * is any text; may be repeated.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Smallest reward.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Greatest reward.")] = None,
    kind: Annotated[TraceKind, typer.Option(help="Trajectories, or the trainer's steps.")] = TraceKind.TRAJECTORY,
    sort: Annotated[str, typer.Option(help=f"{rows.SORTS}; -KEY: greatest first.")] = rows.NEWEST_FIRST,
    limit: Annotated[int, typer.Option(min=1, max=10000)] = 50,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    width: Width = None,
    as_json: Json = False,
) -> None:
    """List traces by tag, step and reward.

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
    wanted = TraceFilter(kind, {**tags, **tags_of(tag or [])}, steps, reward_min, reward_max)
    store = open_store(backend, outputs, project, mlflow_uri)
    found = rows.ordered((rows.row(tree) for tree in store.search(wanted)), sort, limit + 1)
    if as_json:
        print_json([one.model_dump(mode="json") for one in found[:limit]])
        return
    console = wide_enough(width)
    console.print(tables.listing(found[:limit], console.width))
    more = " (more exist: raise --limit)" if len(found) > limit else ""
    console.print(f"{min(len(found), limit)} traces{more}", highlight=False)


@app.command("show")
def traces_show(
    trace: Annotated[str, typer.Argument(help="tr-<hex>, its first digits (6 or more), or a name as s3/i17/n2.")],
    experiment_name: Experiment = None,
    full: Annotated[bool, typer.Option("--full", help="Whole texts and stack traces.")] = False,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    width: Width = None,
    as_json: Json = False,
) -> None:
    """Draw one trajectory: its spans in time, texts, tools, rewards.  Example: trackway traces show s3/i17/n2"""
    tree = refs.resolve(open_store(backend, outputs, project, mlflow_uri), trace, experiment_name)
    if as_json:
        print_json(tree)
        return
    console = wide_enough(width)
    console.print(render.draw(tree, render.Style(console.width, full)))


@app.command("compare")
def traces_compare(
    a: Annotated[str | None, typer.Argument(help="As in `show`.")] = None,
    b: Annotated[str | None, typer.Argument(help="The other one.")] = None,
    sample_index: Annotated[str | None, typer.Option(help="Row of the dataset; instead of A and B.")] = None,
    steps: Annotated[str | None, typer.Option(help="Two steps of that sample: 1,10.")] = None,
    step: Annotated[int | None, typer.Option(help="One step of that sample, with --rollouts.")] = None,
    rollouts: Annotated[str | None, typer.Option(help="Two rollouts of one group: 0,2.")] = None,
    rollout_n: Annotated[int, typer.Option(help="Which rollout, with --steps.")] = 0,
    validate: Validate = None,
    experiment_name: Experiment = None,
    html: Annotated[Path | None, typer.Option(help="Write the comparison as one HTML file.")] = None,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    width: Width = None,
    as_json: Json = False,
) -> None:
    """Show two trajectories side by side: facts, texts, tool calls.

    Example: trackway traces compare --sample-index 7 --steps 1,10 --html compare.html
    """
    choice = refs.Choice(sample_index, steps, step, rollouts, rollout_n, bool(validate))
    pair = choice.pair(a, b)
    store = open_store(backend, outputs, project, mlflow_uri)
    left, right = (refs.resolve(store, one, experiment_name) for one in pair)
    found = compare(left, right)
    if html is not None:
        from trackway.traces import page

        page.write(html, found)
    if as_json:
        print_json(found)
    elif html is not None:
        stdout.print(Text(str(html)), soft_wrap=True)
    else:
        console = wide_enough(width)
        console.print(columns.draw(found, colours=console.color_system is not None and not console.no_color))


@app.command("verify")
def traces_verify(
    step: Annotated[str | None, typer.Option(help="Step, or a range of them: 3, 3-7, 3-; default all.")] = None,
    validate: Validate = None,
    run: Annotated[str | None, typer.Option(help="Name of the run; default the newest.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for spans that are late.")] = 10.0,
    project: Project = None,
    backend: BackendOption = Backend.MLFLOW,
    mlflow_uri: MlflowUri = None,
    outputs: Outputs = OUTPUTS,
    width: Width = None,
    as_json: Json = False,
) -> None:
    """Hold a run's trajectories against their traces: each must be a whole tree; exit status 1 tells of gaps.

    Example: trackway traces verify --step 3 --outputs outputs/demo
    """
    from trackway.deploy.deployment.attach import runs_folder
    from trackway.traces.verify import dumps, find_run, verify

    folder = find_run(runs_folder(outputs), run)
    files = dumps(folder, None if step is None else Steps.parse(step), validate)
    store = open_store(backend, outputs, project, mlflow_uri, otherwise=folder.info().mlflow_uri)
    with meter(as_json) as shown:
        found = verify(store, folder, files, wait, shown)
    if as_json:
        print_json(found)
    else:
        wide_enough(width).print(tables.verification(found))
    if found.gaps:
        raise typer.Exit(1)
