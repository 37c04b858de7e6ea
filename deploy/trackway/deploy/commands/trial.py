"""`trackway try`: the trajectories of one row, before any training."""

from pathlib import Path
from typing import Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, ConfigName, Outputs, json_of, up_settings
from trackway.deploy.terminal.progress import board, print_json, stderr, stdout

app = typer.Typer()


@app.command("try")
def try_row(
    rows: Annotated[Path | None, typer.Argument(help="File of rows; default data.train_files.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    row: Annotated[int, typer.Option(min=1, help="Number of the row; the first is 1.")] = 1,
    n: Annotated[int, typer.Option("--n", min=1, max=1024, help="Rollouts; several are shown with advantages.")] = 1,
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: ConfigName = "default",
    policy: Annotated[
        str | None, typer.Option(help="Policy of the running services, as `trackway policies list` shows it.")
    ] = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the row, its trajectories and their advantages")] = False,
) -> None:
    """Run one row before any training: its turns, tool calls, reward, tokens and seconds.

    Uses the running services of the outputs folder. Without any, it starts what it needs in this process, in seconds
    and without Ray. Rows, tools, scorer and agent loop are checked first, as by `trackway train --preflight`. Exit
    status 1 if a trajectory failed. The same command samples the same tokens; trackway.seed=7 samples others.

    Example: trackway try rows.jsonl --row 3 --n 8
    """
    from trackway.deploy.runs.prepare import prepare
    from trackway.deploy.runs.trial import Trial
    from trackway.deploy.runs.trial_report import trial_report
    from trackway.deploy.terminal.tables import wide

    words = [*(overrides or [])]
    if rows is not None and "=" in str(rows) and not rows.exists():  # an override, as no rows were given
        words, rows = [str(rows), *words], None
    trial = Trial(prepare(words, config, config_name, up_settings(outputs=outputs), trial=True), rows, policy)
    with board(as_json) as shown:
        findings, usable = trial.check(shown.report)
        findings.refuse()
        assert usable is not None
        tried = trial.run(usable, row, n, shown.report)
    if as_json:
        print_json(tried)
    else:
        for reason in (*findings.not_checked, *findings.replaced_here):
            stderr.print(f"[yellow]note:[/] {reason}", soft_wrap=True)
        wide(stdout).print(trial_report(tried, trial.subject.config.data.max_response_length))
    if any(trajectory.error for trajectory in tried.trajectories):
        raise typer.Exit(1)
