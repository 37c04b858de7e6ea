"""`trackway runs list | show | logs`: runs, their metrics and their logs."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, Outputs, RunName, json_of
from trackway.deploy.terminal.progress import print_json, rollout_account, run_detail, sparkline, stderr, stdout
from trackway.system import visible
from trackway.system.process import UserError
from trackway.wire.trainer import ENDED

if TYPE_CHECKING:
    from trackway.deploy.runs.found import FoundRun

app = typer.Typer(no_args_is_help=True)

_POLL_S = 0.5
_SHOWN = (
    "critic/score/mean",
    "actor/",
    "response_length/mean",
    "num_turns/mean",
    "perf/",
    "timing_s/step",
    "fully_async/",
    "val-core/",
    "train/",
    "val/",
)


@app.command("list")
def list_runs(
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the runs with their states and newest metrics")] = False,
) -> None:
    """List the runs of an outputs folder and of the folders in it, the newest first.  Example: trackway runs list"""
    from trackway.deploy.runs.found import find_runs, rewards
    from trackway.deploy.terminal.tables import table, wide

    found = find_runs(outputs)
    if as_json:
        print_json([{**run.info.model_dump(mode="json"), "outputs": str(run.outputs)} for run in found])
        return
    if not found:
        stderr.print(f"no runs in {outputs}; start one with `trackway demo` or `trackway train`, or give --outputs")
        return
    rows = [
        (
            visible(run.info.run),
            _state(run),
            run.info.progress.replace(" of ", "/"),
            sparkline(rewards(run.rows())),
            run_detail(run.info),
            str(run.outputs),
        )
        for run in found
    ]
    wide(stdout).print(table("", ("run", "state", "step", "reward", "now", "outputs"), rows))


@app.command()
def show(
    name: RunName,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the run with its state and newest metrics")] = False,
) -> None:
    """Show where a run stands, its newest metrics and where its traces are.  Example: trackway runs show tiny-demo"""
    from trackway.deploy.runs.found import LOSS, OWN_LOSS, find_run, idle_time, rewards
    from trackway.deploy.terminal.tables import table, wide

    run = find_run(outputs, name)
    info = run.info
    if as_json:
        print_json(info)
        return
    rows = run.rows()
    lines = [
        ("state", _state(run) + (f": {visible(info.message)}" if info.message else "")),
        ("step", info.progress + (f", {info.restarts} restarts" if info.restarts else "")),
        ("progress", f"{sparkline(rewards(rows))}  {run_detail(info)}"),
        *([] if {LOSS, OWN_LOSS} & info.metrics.keys() else [("policy", info.policy or "the default one")]),
        ("folder", info.folder),
    ]
    if run.log is not None:
        lines.append(("log", f"trackway runs logs {name} --outputs {run.outputs}"))
    of_steps = OWN_LOSS in info.metrics and info.mlflow_uri
    if info.traces is not None or of_steps:
        kind = " --kind step" if of_steps else ""
        lines.append(("traces", f"trackway traces list{kind} --run {name} --outputs {run.outputs}"))
    lines += [("rollouts", sentence) for sentence in rollout_account(info)]
    if idle := idle_time(rows):
        lines.append(("idle", idle))
    if info.waits:
        lines.append(("waits for", f"{info.waits[0].waits_for}; see trackway why {name} --outputs {run.outputs}"))
    console = wide(stdout)
    console.print(table(f"run {name}", ("", ""), lines))
    metrics = [(key, f"{value:.4g}") for key, value in sorted(info.metrics.items()) if key.startswith(_SHOWN)]
    if metrics:
        console.print(table(f"metrics of step {info.step}", ("metric", "value"), metrics))


@app.command()
def logs(
    name: RunName,
    outputs: Outputs = OUTPUTS,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Lines from the end; 0 prints the whole log.")
    ] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    as_json: Annotated[bool, json_of("the path of the log and its lines; with --follow at the run's end")] = False,
) -> None:
    """Print the log of a run's process.  Example: trackway runs logs tiny-demo --follow"""
    from trackway.deploy.runs.found import find_run

    run = find_run(outputs, name)
    if run.log is None:
        raise UserError(
            f"run {name}: expected a log on this machine, got a run of attached services; its log is "
            f"{run.info.folder}/worker.log on their volume"
        )
    if not run.log.is_file():
        raise UserError(f"run {name}: expected a log at {run.log}, got none; its process has not started")
    with run.log.open(encoding="utf-8", errors="replace") as file:
        if as_json:
            for _ in _polls_until_end(outputs, name) if follow else ():
                time.sleep(_POLL_S)
            newest = deque(file, maxlen=lines or None)
            print_json({"log": str(run.log), "lines": [line.removesuffix("\n") for line in newest]})
            return
        _print_lines(deque(file, maxlen=lines or None))
        for _ in _polls_until_end(outputs, name) if follow else ():
            _print_lines(file)
            time.sleep(_POLL_S)
        _print_lines(file)


def _polls_until_end(outputs: Path, name: str) -> Iterator[None]:
    """Yields while the run has not ended."""
    from trackway.deploy.runs.found import find_run

    while find_run(outputs, name).info.state not in ENDED:
        yield


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        stdout.out(visible(line, keep="\t\n"), end="", highlight=False)


def _state(run: "FoundRun") -> str:
    """The state. A run that no service answers for may have ended without writing it."""
    state = run.info.state
    return f"{state.value} when last written" if run.services is None and state not in ENDED else state.value
