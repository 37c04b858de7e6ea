"""`trackway traces list`: trajectories' traces by tag."""

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trackway.deploy import traces
from trackway.deploy.commands.options import OUTPUTS, Json, Outputs
from trackway.deploy.console import print_json, stdout

app = typer.Typer(no_args_is_help=True, help="Find trajectories' traces in MLflow.")


@app.callback()
def _group() -> None:
    """Keeps `list` a sub-command although it is the only one."""


@app.command("list")
def traces_list(
    step: Annotated[int | None, typer.Option(help="Training step.")] = None,
    sample_index: Annotated[int | None, typer.Option(help="Row of the dataset.")] = None,
    rollout_n: Annotated[int | None, typer.Option(help="Number within the group.")] = None,
    validate: Annotated[bool | None, typer.Option("--validate/--train", help="Validation or training only.")] = None,
    experiment_name: Annotated[str | None, typer.Option(help="Name of the run.")] = None,
    project: Annotated[str | None, typer.Option(help="MLflow experiment; default all.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10000)] = 50,
    outputs: Outputs = OUTPUTS,
    as_json: Json = False,
) -> None:
    """List trajectories' traces.  Example: trackway traces list --step 1 --outputs outputs/demo"""
    uri = traces.store_uri(outputs)
    tags = traces.tag_filter(
        step=step, sample_index=sample_index, rollout_n=rollout_n, validate=validate, experiment_name=experiment_name
    )
    rows = [traces.row(trace) for trace in traces.search(uri, traces.experiment_ids(uri, project), tags, limit)]
    if as_json:
        print_json([one.model_dump(mode="json") for one in rows])
        return
    table = Table("trace", "name", "state", "experiment", "ms", "answer", box=None)
    for one in rows:
        name, duration = one.tags.get("experiment_name", ""), str(one.duration_ms or "")
        table.add_row(one.trace_id, one.name, one.state, name, duration, escape(one.preview[-60:]))
    stdout.print(table)
    stdout.print(
        f"{len(rows)} traces{' (more exist: raise --limit)' if len(rows) == limit else ''}; filter: {tags or 'none'}"
    )
