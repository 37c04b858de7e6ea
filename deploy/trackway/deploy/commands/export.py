"""`trackway export`: a checkpoint of a run as a Hugging Face folder, or trajectories in formats that others read."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.markup import escape

from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.terminal.progress import file_bar, print_json, stdout
from trackway.system import visible
from trackway.system.process import UserError

app = typer.Typer()


@app.command()
def export(
    name: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run, or ATIF documents: a .json file, or a folder with a / in its path."),
    ],
    target: Annotated[Path, typer.Argument(help="New folder; with --as chat a new file.")],
    kind: Annotated[
        Literal["model", "atif", "datasets", "chat"],
        typer.Option(
            "--as",
            help="model: the checkpoint for transformers or PEFT. atif: trajectories as documents of ATIF 1.8. "
            "datasets: for datasets.load_dataset. chat: JSONL of messages, tools and reward.",
        ),
    ] = "model",
    step: Annotated[
        int | None, typer.Option(min=0, help="Step; default the newest checkpoint, or the trajectories of all steps.")
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA run, write the whole model with the adapter in its weights.")
    ] = False,
    where: Annotated[
        str | None, typer.Option(help='Which trajectories, such as "score > 0.5 and not failed and step in (1, 2)".')
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="The trajectories of validations in place of those trained on.")
    ] = False,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("what was written, and where")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, or trajectories in a format that other programs read.

    Example: trackway export tiny-demo outputs/model
    Example: trackway export tiny-demo sft.jsonl --as chat --where "score > 0.5 and not failed"
    """
    from trackway.deploy.runs.found import find_run

    is_file = "/" in name or name.endswith(".json")
    unfit = merge if kind != "model" else validation or where is not None
    if unfit or (is_file and (validation or step is not None)):
        raise UserError(
            "expected --merge with a model, --where with trajectories, --validation and --step with a run, got another "
            f"of these options with {name} --as {kind}; leave it out"
        )
    if kind == "model":
        from trackway.trainer.run_state.export import export_checkpoint

        exported = export_checkpoint(find_run(outputs, name).folder, target, step, merge=merge)
        loads = "transformers loads" if exported.kind == "model" else "PEFT loads beside its base model"
        line = f"{exported.checkpoint} is now the {exported.kind} {exported.folder}, which {loads}"
    else:
        from trackway.trainer.run_state.trajectory_export import (
            Source,
            atif_files,
            export_trajectories,
            source_of,
        )

        run = None if is_file else find_run(outputs, name).folder
        source = Source(atif_files(Path(name))) if run is None else source_of(run, step, validation)
        with file_bar(as_json) as show:
            exported = export_trajectories(source, kind, target, where, show)
        line = (
            f"{exported.target} has {exported.trajectories} of {exported.trajectories + exported.filtered} trajectories"
        )
        if exported.further_rows and kind == "chat":
            line += (
                f"; {exported.further_rows} further rows of sessions are left out, which --as datasets and atif have"
            )
        if not source.tools:
            line += "; without definitions of tools, which are not recorded"
    if as_json:
        print_json(exported._asdict())
        return
    stdout.print(escape(visible(line)), soft_wrap=True)
