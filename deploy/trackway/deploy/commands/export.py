"""`trackway export`: a checkpoint of a run as a Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import OUTPUTS, Outputs, RunName, json_of
from trackway.deploy.terminal.progress import print_json, stdout
from trackway.system import visible

app = typer.Typer()


@app.command()
def export(
    name: RunName,
    folder: Annotated[Path, typer.Argument(help="New folder for the model or the adapter.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; default the newest.")] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run, write the whole model with the adapter in its weights.")
    ] = False,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the checkpoint, the folder, and its files")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder.  Example: trackway export tiny-demo outputs/model"""
    from trackway.deploy.runs.found import find_run
    from trackway.trainer.run_state.export import export_checkpoint

    run = find_run(outputs, name)
    exported = export_checkpoint(run.folder, folder, step, merge=merge)
    if as_json:
        print_json(exported._asdict())
        return
    loads = "transformers loads" if exported.kind == "model" else "PEFT loads beside its base model"
    line = f"{exported.checkpoint} is now the {exported.kind} {exported.folder}, which {loads}"
    stdout.print(escape(visible(line)), soft_wrap=True)
