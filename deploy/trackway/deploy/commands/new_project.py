"""`trackway init`: a project of one's own."""

from pathlib import Path
from typing import Annotated

import typer

from trackway.deploy.commands.options import json_of
from trackway.deploy.local.new_project import templates, write_project
from trackway.deploy.terminal.console import print_json, stdout

app = typer.Typer()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="New folder; its name is the project's.")],
    template: Annotated[
        str, typer.Option("--from", help=f"What to begin with: {', '.join(templates())}.")
    ] = "calculator",
    as_json: Annotated[bool, json_of("the folder and the names of its files")] = False,
) -> None:
    """Write a project: rows, a tool, a reward function, an agent loop, a configuration and a test.

    `trackway try rows.jsonl` and `trackway train` work in the folder at once. The tiny model earns rewards with
    `calculator` alone; the others need a model of yours.

    Example: trackway init my-agent
    """
    files = [str(file) for file in write_project(folder, template)]
    if as_json:
        print_json({"folder": str(folder.expanduser().resolve()), "from": template, "files": files})
        return
    stdout.print(f"{folder} has {', '.join(files)}", soft_wrap=True, highlight=False)
    for line in (f"cd {folder}", "trackway try rows.jsonl", "trackway train"):
        stdout.print(f"  {line}", soft_wrap=True, highlight=False)
    if template != "calculator":
        note = "the tiny model's rewards are 0 here: set actor_rollout_ref.model.path in trackway.yaml for a real run"
        stdout.print(note, soft_wrap=True, highlight=False)
