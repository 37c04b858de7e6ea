"""`trackway demo`: train the tiny model and summarize the run, on local or attached services."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_OUTPUTS, Json, Wait, up_settings
from trackway.deploy.commands.training import report_losses
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.system.user_error import UserError

if TYPE_CHECKING:
    from trackway.deploy.runs.demo import Summary
    from trackway.deploy.runs.demo_attached import AttachedDemo

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
    as_json: Json = False,
) -> None:
    """Train the tiny model on local or attached services and trace every step.

    Example: trackway demo --seed 1

    Example: trackway demo --attached --data-dir /var/lib/trackway/data --wait 600
    """
    if not attached:
        if data_dir or wait:
            raise UserError("--data-dir and --wait: expected --attached with them, got none; add --attached")
        _train_here(seed, outputs or DEMO_OUTPUTS, overrides or [], keep, as_json)
        return
    from trackway.deploy.runs.demo_attached import AttachedDemo

    deployment = _attached(UpSettings.read().outputs if outputs is None else outputs)
    _train_attached(AttachedDemo(deployment, seed, data_dir, model_path, overrides or []), wait, as_json)


def _train_here(seed: int, outputs: Path, overrides: list[str], keep: bool, as_json: bool) -> None:
    from trackway.deploy.local.up import bring_up, take_down
    from trackway.deploy.runs import demo as demonstration
    from trackway.deploy.runs.launch import check_backends_here
    from trackway.trainer.config import compose

    check_backends_here(compose(overrides, config_name="tiny_demo"))
    clock = demonstration.Clock(time.monotonic())
    _set_aside(outputs)
    settings = up_settings(outputs=outputs, min_memory_gb=4.0)
    settings.mlflow_uri = None  # the demo starts its own MLflow and ignores MLFLOW_TRACKING_URI
    with board(as_json) as shown:
        deployment = bring_up(settings, shown.report)
    started = dict(shown.seconds)
    clock.services_ready = time.monotonic()
    try:
        with run_bar(as_json) as bar:
            info = demonstration.run(deployment, settings, seed, overrides, bar.show)
        clock.trained = time.monotonic()
        summary = demonstration.summarise(deployment, info, clock)
    except KeyboardInterrupt:
        stderr.print(f"checkpoint saved; to resume: trackway up --outputs {outputs}, then")
        stderr.print(f"trackway train --resume {demonstration.run_name(seed)} --outputs {outputs}")
        raise
    finally:
        if not keep:
            with board(as_json) as shown:
                take_down(deployment, shown.report)
    if as_json:
        print_json(summary)
        return
    _print_summary(summary, started, deployment, Path(info.folder))
    report_losses(info, deployment)


def _set_aside(outputs: Path) -> None:
    from trackway.deploy.runs.demo import set_aside

    previous = Deployment.load(outputs.resolve())
    if previous and previous.attached:
        raise UserError(
            f"{outputs} is attached to services at {previous.base_url}; add --attached to run the demo there, or give "
            "another --outputs"
        )
    if previous and previous.started_here:
        raise UserError(f"a demo is already running in {outputs}; stop it with `trackway down --outputs {outputs}`")
    aside = set_aside(outputs)
    if aside:
        stderr.print(f"earlier demo kept in {aside}")


def _print_summary(summary: "Summary", started: dict[str, float], deployment: Deployment, folder: Path) -> None:
    from trackway.deploy.runs.demo import sentence

    stdout.print(f"\n{sentence(summary)}")
    stdout.print(
        f"seconds: Ray ready at {started['ray']:.0f}, MLflow at {started['mlflow']:.0f}, all services at "
        f"{max(started.values()):.0f}; training took {summary.seconds_training:.0f}; {summary.seconds_total:.0f} in all"
    )
    stdout.print(f"reward curve   {deployment.outputs / 'reward.png'}", soft_wrap=True)
    stdout.print(f"run            {folder}", soft_wrap=True)
    stdout.print(
        f"traces         trackway ui --outputs {deployment.outputs}   then search: tags.step = '1'", soft_wrap=True
    )


def _attached(outputs: Path) -> Deployment:
    deployment = Deployment.load(outputs.resolve())
    if deployment is None or not deployment.attached:
        raise UserError(
            f"expected {outputs} to be attached to running services, got no attachment; run `trackway attach "
            f"--base-url http://... --outputs {outputs}` first"
        )
    return deployment


def _train_attached(demo: "AttachedDemo", wait: float, as_json: bool) -> None:
    from trackway.deploy.deployment.attach import wait_for
    from trackway.deploy.runs.demo import Clock
    from trackway.deploy.runs.demo_attached import summarise
    from trackway.wire.health import Ready

    clock, deployment = Clock(time.monotonic()), demo.deployment
    with board(as_json) as shown:
        wait_for(deployment, wait, shown.report, "/ready", Ready)
    clock.services_ready = time.monotonic()
    info, done = demo.start()
    stderr.print(escape(done), soft_wrap=True)
    try:
        with run_bar(as_json) as bar:
            info = demo.follow(info, bar.show)
    except KeyboardInterrupt:
        again = f"trackway train --resume {info.run} --outputs {deployment.outputs}"
        stderr.print(f"checkpoint saved; to resume, repeat this command or run: {escape(again)}", soft_wrap=True)
        raise
    clock.trained = time.monotonic()
    summary, notes = summarise(deployment, info, clock)
    if as_json:
        print_json(summary)
        return
    for note in notes:
        stderr.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    _print_attached_summary(summary, deployment, f"{info.run} in {info.folder}")
    report_losses(info, deployment)


def _print_attached_summary(summary: "Summary", deployment: Deployment, run: str) -> None:
    from trackway.deploy.runs.demo import sentence

    stdout.print(sentence(summary), soft_wrap=True)
    stdout.print(f"seconds   training {summary.seconds_training:.0f}; {summary.seconds_total:.0f} in all")
    stdout.print(f"run       {run}", soft_wrap=True)
    stdout.print(f"summary   {deployment.outputs / 'summary.json'}", soft_wrap=True)
    if summary.mlflow_uri:
        stdout.print(f"traces    {summary.mlflow_uri}   search: tags.step = '1'", soft_wrap=True)
