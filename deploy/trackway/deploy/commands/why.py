"""`trackway why` shows what a run waits for. `trackway doctor` shows what this machine has and lacks."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trackway.deploy.commands.options import DEMO_MEMORY_GB, OUTPUTS, Outputs, RunName, json_of, up_settings
from trackway.deploy.terminal.progress import print_json, stdout
from trackway.system import visible

if TYPE_CHECKING:
    from trackway.wire.service import Wait
    from trackway.wire.trainer import RunInfo

app = typer.Typer()


@app.command()
def why(
    name: RunName,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the run's state, policy, message and waits")] = False,
) -> None:
    """Show what a run waits for at present, since when and until when.  Example: trackway why tiny-demo"""
    from trackway.deploy.runs.found import find_run

    info = find_run(outputs, name).info
    if as_json:
        print_json(info.model_dump(mode="json", include={"run", "policy", "state", "step", "message", "waits"}))
        return
    for line in reasons(info, time.time()):
        stdout.print(escape(visible(line)), soft_wrap=True)


def reasons(info: "RunInfo", now_s: float) -> Iterator[str]:
    """The run's state, and a line for each wait, below the wait that it causes. `now_s` is in seconds since 1970."""
    from trackway.wire.trainer import ENDED, RunState

    policy = f" (policy {info.policy})" if info.policy else ""
    yield f"run {info.run}{policy} is {info.state}, after step {info.progress}" + (
        f": {info.message}" if info.message else ""
    )
    if info.waits:
        yield from _lines(info.waits, now_s, "  ")
    elif info.state in (RunState.STARTING, RunState.RESTARTING):
        yield "  its process is starting; imports alone take seconds"
    elif info.state not in ENDED:
        yield "  it waits for nothing; a wait is shown after two seconds"


def _lines(waits: "Sequence[Wait]", now_s: float, indent: str) -> Iterator[str]:
    from trackway.system.waits import described

    for wait in waits:
        yield indent + described(wait, now_s)
        yield from _lines(wait.because, now_s, indent + "  ")


@app.command()
def doctor(
    outputs: Outputs = OUTPUTS,
    model_path: Annotated[
        Path | None, typer.Option(help="Hugging Face folder of the policy; default: the demo's.")
    ] = None,
    as_json: Annotated[bool, json_of("each part with what it lacks and the remedy")] = False,
) -> None:
    """Show what this machine has and lacks for each part, with the remedy.

    Exit status 0 if `trackway demo` can run here, 1 otherwise.

    Example: trackway doctor --json
    """
    from trackway.deploy.checks.doctor import examine

    examination = examine(up_settings(outputs=outputs, model_path=model_path, min_memory_gb=DEMO_MEMORY_GB))
    if as_json:
        print_json(examination)
    else:
        table = Table(box=None, show_header=False)
        for finding in examination.findings:
            sign = "[green]✓[/]" if finding.ok else "[red]✗[/]" if finding.demo else "[yellow]-[/]"
            table.add_row(sign, escape(finding.name), escape(finding.found))
            if finding.remedy:
                table.add_row("", "", f"[dim]{escape(finding.remedy)}[/]")
        stdout.print(table)
        lacking = ", ".join(finding.name for finding in examination.findings if finding.demo and not finding.ok)
        can = "can run here" if examination.demo else f"cannot run here: {escape(lacking)}"
        stdout.print(f"`trackway demo` {can}", soft_wrap=True)
    if not examination.demo:
        raise typer.Exit(1)
