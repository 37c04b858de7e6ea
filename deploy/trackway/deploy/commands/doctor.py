"""`trackway doctor`: what this machine has and lacks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trackway.deploy.commands.options import DEMO_MEMORY_GB, OUTPUTS, Outputs, json_of, up_settings
from trackway.deploy.terminal.progress import print_json, stdout

app = typer.Typer()


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
