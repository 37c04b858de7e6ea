"""`trackway demo`: train the tiny model and summarize the run, on local or attached services."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_MEMORY_GB, Keep, Wait, json_of, up_settings
from trackway.deploy.commands.run_output import print_end, report_losses, run_to_end
from trackway.deploy.terminal.progress import board, print_json, stderr, stdout
from trackway.system.process import UserError

if TYPE_CHECKING:
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.demo import Summary
    from trackway.wire.trainer import RunInfo

app = typer.Typer()

DEMO_OUTPUTS = Path("outputs/demo")


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
    keep: Keep = False,
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
    from trackway.deploy.checks.run import check_start
    from trackway.deploy.deployment.attach import folder_here
    from trackway.deploy.runs.demo import PhaseTimes, demo_words, set_aside, summarise, write_rows
    from trackway.deploy.runs.prepare import prepare
    from trackway.deploy.runs.shown import delivered, opened
    from trackway.wire.trainer import RunState

    clock, name, words = PhaseTimes(time.monotonic()), f"seed{seed}", overrides or []
    if attached:
        settings = up_settings(**({"outputs": outputs} if outputs else {}))
        name, words = _attached(settings.outputs, seed, model_path, words, wait, as_json)
    elif data_dir or wait:
        raise UserError("--data-dir and --wait: expected --attached with them, got none; add --attached")
    else:
        settings = up_settings(outputs=outputs or DEMO_OUTPUTS, min_memory_gb=DEMO_MEMORY_GB)
        settings.mlflow_uri = None  # the demo starts its own MLflow and ignores MLFLOW_TRACKING_URI
        data_dir = settings.outputs.resolve() / "data"
        _check_free(settings.outputs)
    subject = prepare(demo_words(seed, name, data_dir, words), None, "tiny_demo", settings)
    if not attached:
        subject.occupied = ""  # its folder is set aside
        check_start(subject)
        if aside := set_aside(settings.outputs):
            stderr.print(f"earlier demo kept in {aside}")
    for key, asked, got, reason in subject.decisions:
        stderr.print(escape(f"{key}={asked}: {got}{f', {reason}' if reason else ''}"), soft_wrap=True)
    write_rows(seed, data_dir, words)
    with opened(subject, as_json, keep) as session:
        clock.services_ready = time.monotonic()
        info = run_to_end(session, name, lambda show: session.submit(subject, show), as_json)
        clock.trained = time.monotonic()
        if info.state is not RunState.FINISHED:
            raise UserError(
                f"run {name} was stopped at step {info.step} of {info.total_steps}; resume it with "
                f"`trackway train --resume {name} --outputs {settings.outputs}`"
            )
        info = delivered(session, info, as_json)
        folder = folder_here(info)
        if folder is None:
            print_end(info, session.deployment, as_json)
            return
        summary, notes = summarise(session.deployment, folder, info, clock)
    if as_json:
        print_json(summary)
        return
    for note in notes:
        stderr.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    _print_end(summary, info, session.deployment)


def _attached(
    outputs: Path, seed: int, model_path: str | None, overrides: list[str], wait: float, as_json: bool
) -> tuple[str, list[str]]:
    """The name of the run on attached services, once they are ready, and the overrides with their model."""
    from trackway.clients import TrainerClient
    from trackway.clients import run as wait_for_reply
    from trackway.deploy.deployment.attach import wait_for
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.runs.demo import name_of
    from trackway.deploy.runs.prepare import typed
    from trackway.wire.service import Ready

    deployment = Deployment.load(outputs.resolve())
    if deployment is None or not deployment.attached:
        raise UserError(
            f"expected {outputs} to be attached to running services, got no attachment; run `trackway attach "
            f"--base-url http://... --outputs {outputs}` first"
        )
    if not typed(overrides) & {"actor_rollout_ref.model.path"}:
        if model_path is None:
            raise UserError(
                "--model-path: expected the model's path or id as the services see it, got none; give it, or set "
                "TRACKWAY_MODEL_PATH to the services' value"
            )
        overrides = [*overrides, f"actor_rollout_ref.model.path='{model_path}'"]
    with board(as_json) as shown:
        wait_for(deployment, wait, shown.report, "/ready", Ready)
    return name_of(seed, wait_for_reply(TrainerClient(deployment.url("trainer")).runs())), overrides


def _check_free(outputs: Path) -> None:
    from trackway.deploy.deployment.record import recorded

    previous = recorded(outputs)
    if previous and previous.attached:
        raise UserError(
            f"{outputs} is attached to services at {previous.address}; add --attached to run the demo there, or give "
            "another --outputs"
        )
    if previous:
        raise UserError(f"a demo is already running in {outputs}; stop it with `trackway down --outputs {outputs}`")


def _print_end(summary: "Summary", info: "RunInfo", deployment: "Deployment") -> None:
    """Print the summary, what was lost and, last, the command that opens the run."""
    _print_summary(summary, deployment, f"{info.run} in {info.folder}")
    report_losses(info, deployment)
    stdout.print(f"console        trackway console --outputs {Path(info.folder).parent}", soft_wrap=True)


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
