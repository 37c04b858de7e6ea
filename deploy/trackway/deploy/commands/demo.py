"""`trackway demo`: train the tiny model and summarize the run, on local or attached services."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_MEMORY_GB, DEMO_OUTPUTS, Wait, json_of, up_settings
from trackway.deploy.commands.run_output import report_interrupted, report_losses, wait_for_delivery
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.system.user_error import UserError

if TYPE_CHECKING:
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.demo import Demo, PhaseTimes, Summary
    from trackway.wire.trainer import RunInfo

app = typer.Typer()


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of data order, sampling and learner.")] = 0,
    outputs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the demo; default outputs/demo (an existing one is renamed), with --attached outputs."
        ),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of the tiny_demo preset: key=value.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep services and MLflow running afterwards.")] = False,
    attached: Annotated[
        bool, typer.Option("--attached", help="Train on the services given to `trackway attach`.")
    ] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="With --attached: folder on the services' volume for the dataset.")
    ] = None,
    model_path: Annotated[
        str | None,
        typer.Option(help="With --attached: model path or id as the services see it.", envvar="TRACKWAY_MODEL_PATH"),
    ] = None,
    wait: Wait = 0.0,
    as_json: Annotated[bool, json_of("the run's accuracies, trajectories, traces and seconds")] = False,
) -> None:
    """Train the tiny model on local or attached services and trace every step.

    Example: trackway demo --seed 1

    Example: trackway demo --attached --data-dir /var/lib/trackway/data --wait 600
    """
    if attached:
        deployment = _attached(up_settings().outputs if outputs is None else outputs)
        _train_attached(deployment, seed, data_dir, model_path, overrides or [], wait, as_json)
        return
    if data_dir or wait:
        raise UserError("--data-dir and --wait: expected --attached with them, got none; add --attached")
    _train_here(seed, outputs or DEMO_OUTPUTS, overrides or [], keep, as_json)


def _train_here(seed: int, outputs: Path, overrides: list[str], keep: bool, as_json: bool) -> None:
    from trackway.deploy.local.up import bring_up, take_down
    from trackway.deploy.runs.demo import Demo, PhaseTimes, services_of
    from trackway.deploy.runs.launch import check_backends_here
    from trackway.trainer.config import compose

    check_backends_here(compose(overrides, config_name="tiny_demo"))
    settings = up_settings(outputs=outputs, min_memory_gb=DEMO_MEMORY_GB)
    settings.mlflow_uri = None  # the demo starts its own MLflow and ignores MLFLOW_TRACKING_URI
    services = services_of(overrides, settings) if overrides else None  # the preset's are those of the settings
    clock = PhaseTimes(time.monotonic())
    _set_aside(outputs)
    if services is not None:
        settings, overrides = services.settings, services.overrides
        for key, asked, got, reason in services.decisions:
            stderr.print(escape(f"{key}={asked}: {got}{f', {reason}' if reason else ''}"), soft_wrap=True)
    with board(as_json) as shown:
        deployment = bring_up(settings, shown.report, None if services is None else services.serve_config)
    started = dict(shown.seconds)
    if not as_json:
        stderr.print(
            f"seconds: Ray ready at {started['ray']:.0f}, MLflow at {started['mlflow']:.0f}, all services at "
            f"{max(started.values()):.0f}"
        )
    model = str(settings.model_path.resolve())
    demo = Demo(deployment, seed, deployment.outputs / "data", model, overrides)
    try:
        _train(demo, clock, f"run `trackway up --outputs {outputs}`, then", as_json, keep)
    finally:
        if not keep:
            with board(as_json) as shown:
                take_down(deployment, shown.report)


def _train_attached(
    deployment: "Deployment",
    seed: int,
    data_dir: Path | None,
    model_path: str | None,
    overrides: list[str],
    wait: float,
    as_json: bool,
) -> None:
    from trackway.deploy.deployment.attach import wait_for
    from trackway.deploy.runs.demo import Demo, PhaseTimes
    from trackway.wire.health import Ready

    clock = PhaseTimes(time.monotonic())
    with board(as_json) as shown:
        wait_for(deployment, wait, shown.report, "/ready", Ready)
    _train(
        Demo(deployment, seed, data_dir, model_path, overrides),
        clock,
        "repeat this command or run:",
        as_json,
        keep=True,
    )


def _train(demo: "Demo", clock: "PhaseTimes", to_resume: str, as_json: bool, keep: bool) -> None:
    """Start or resume the run, follow it, and print its summary. `keep`: the services run on afterwards."""
    from trackway.deploy.runs.demo import summarise

    deployment = demo.deployment
    clock.services_ready = time.monotonic()
    info, done = demo.start()
    stderr.print(escape(done), soft_wrap=True)
    try:
        with run_bar(as_json) as bar:
            info = demo.follow(info, bar.show)
    except KeyboardInterrupt:
        resume = f"to resume, {to_resume} trackway train --resume {info.run} --outputs {deployment.outputs}"
        report_interrupted(info.run, deployment, resume, stopping=not keep)
        raise
    clock.trained = time.monotonic()
    info = wait_for_delivery(info, deployment, as_json, stopping=not keep)
    summary, notes = summarise(deployment, info, clock)
    if as_json:
        print_json(summary)
        return
    for note in notes:
        stderr.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    _print_end(summary, info, deployment)


def _print_end(summary: "Summary", info: "RunInfo", deployment: "Deployment") -> None:
    """Print the summary, what was lost and, last, the command that opens the run."""
    _print_summary(summary, deployment, f"{info.run} in {info.folder}")
    report_losses(info, deployment)
    stdout.print(f"console        {console_of(info, deployment)}", soft_wrap=True)


def console_of(info: "RunInfo", deployment: "Deployment") -> str:
    """The command that opens the run in the console, and where to start it if not here."""
    from trackway.deploy.deployment.attach import folder_here

    if not deployment.attached:
        return f"trackway console --outputs {deployment.outputs}"
    command = f"trackway console --outputs {Path(info.folder).parent}"
    return command if folder_here(info) else f"{command}   where the services' volume is mounted"


def _print_summary(summary: "Summary", deployment: "Deployment", run: str) -> None:
    from trackway.deploy.runs.demo import REWARD_CURVE, sentence

    outputs, curve = deployment.outputs, deployment.outputs / REWARD_CURVE
    where = summary.mlflow_uri if deployment.attached else f"trackway ui --outputs {outputs}"
    stdout.print(f"\n{sentence(summary)}", soft_wrap=True)
    stdout.print(f"seconds        training {summary.seconds_training:.0f}; {summary.seconds_total:.0f} in all")
    if curve.exists():
        stdout.print(f"reward curve   {curve}", soft_wrap=True)
    stdout.print(f"run            {run}", soft_wrap=True)
    stdout.print(f"summary        {outputs / 'summary.json'}", soft_wrap=True)
    if where:
        stdout.print(f"traces         {where}   then filter by Tag: step = 1", soft_wrap=True)


def _set_aside(outputs: Path) -> None:
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.demo import set_aside

    previous = Deployment.load(outputs.resolve())
    if previous and previous.attached:
        raise UserError(
            f"{outputs} is attached to services at {previous.address}; add --attached to run the demo there, or give "
            "another --outputs"
        )
    if previous and previous.started_here:
        raise UserError(f"a demo is already running in {outputs}; stop it with `trackway down --outputs {outputs}`")
    aside = set_aside(outputs)
    if aside:
        stderr.print(f"earlier demo kept in {aside}")


def _attached(outputs: Path) -> "Deployment":
    from trackway.deploy.deployment.record import Deployment

    deployment = Deployment.load(outputs.resolve())
    if deployment is None or not deployment.attached:
        raise UserError(
            f"expected {outputs} to be attached to running services, got no attachment; run `trackway attach "
            f"--base-url http://... --outputs {outputs}` first"
        )
    return deployment
