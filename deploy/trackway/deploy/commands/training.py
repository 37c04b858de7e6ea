"""`trackway train | demo | ui`: a run, from its start to looking at it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_OUTPUTS, OUTPUTS, Json, Outputs, up_settings
from trackway.deploy.console import board, print_json, run_bar, stderr, stdout
from trackway.deploy.errors import UserError
from trackway.deploy.settings import Deployment
from trackway.wire.trainer import RunInfo

if TYPE_CHECKING:
    from trackway.deploy.demo import Summary
    from trackway.trainer.config import RunConfig

app = typer.Typer()


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file, or a folder with --config-name in it.")] = None,
    config_name: Annotated[str, typer.Option(help="Preset: default, ppo_trainer, tiny_demo.")] = "default",
    run: Annotated[str | None, typer.Option(help="Name of the run; default trainer.experiment_name.")] = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    outputs: Outputs = OUTPUTS,
    as_json: Json = False,
) -> None:
    """Train on the running services.

    Example: trackway train --config-name tiny_demo data.train_files=d/train.parquet data.val_files=d/test.parquet
    """
    from trackway.deploy import train as training
    from trackway.deploy.up import load_running
    from trackway.trainer.config import compose

    run_config = None if resume else training.localised(compose(overrides or [], config, config_name))
    if dry_run and run_config is not None:
        _tell_plan(run_config)
        return
    deployment = load_running(outputs)
    if run_config is None:
        info = training.resume_run(deployment, resume or "")
    else:
        _tell_settings(run_config)
        info = training.start_run(deployment, run_config, run)
    try:
        with run_bar(as_json) as bar:
            info = training.follow(deployment, info.run, bar.show)
    except KeyboardInterrupt:
        stderr.print(f"saved; go on with: trackway train --resume {info.run}")
        raise
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}")
    tell_losses(info, deployment)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of data order, sampling and learner.")] = 0,
    outputs: Annotated[Path, typer.Option(help="Folder of the demo; an earlier one is set aside.")] = Path(
        "outputs/demo"
    ),
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the tiny_demo preset: key=value.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave services and MLflow running at the end.")] = False,
    as_json: Json = False,
) -> None:
    """Train the tiny model on this machine and look at every step of it.  Example: trackway demo --seed 1"""
    from trackway.deploy import demo as demonstration
    from trackway.deploy.train import check_backends_here
    from trackway.deploy.up import bring_up, take_down
    from trackway.trainer.config import compose

    check_backends_here(compose(overrides or [], config_name="tiny_demo"))
    clock = demonstration.Clock(time.monotonic())
    previous = Deployment.load(outputs.resolve())
    if previous and any(process.find() for process in previous.processes):
        raise UserError(f"a demo runs in {outputs} already; stop it with `trackway down --outputs {outputs}`")
    aside = demonstration.set_aside(outputs)
    if aside:
        stderr.print(f"earlier demo kept in {aside}")
    settings = up_settings(outputs=outputs, min_memory_gb=4.0)
    settings.mlflow_uri = None  # the demo has an MLflow of its own, whatever MLFLOW_TRACKING_URI says
    with board(as_json) as shown:
        deployment = bring_up(settings, shown.report)
    started = dict(shown.seconds)
    clock.services_ready = time.monotonic()
    try:
        with run_bar(as_json) as bar:
            info = demonstration.run(deployment, settings, seed, overrides or [], bar.show)
        clock.trained = time.monotonic()
        summary = demonstration.summarise(deployment, info, clock)
    except KeyboardInterrupt:
        stderr.print(f"saved; go on with: trackway up --outputs {outputs}, then")
        stderr.print(f"trackway train --resume {demonstration.run_name(seed)} --outputs {outputs}")
        raise
    finally:
        if not keep:
            with board(as_json) as shown:
                take_down(deployment, shown.report)
    if as_json:
        print_json(summary)
        return
    _tell(summary, started, deployment, Path(info.folder))
    tell_losses(info, deployment)


def _tell_settings(config: "RunConfig") -> None:
    from trackway.deploy.run_report import settings_report, wide
    from trackway.deploy.run_services import decided_already

    wide(stderr).print(settings_report(config, decided_already(config)))


def _tell_plan(config: "RunConfig") -> None:
    from trackway.deploy.dry_run import dry_run
    from trackway.deploy.run_report import wide

    _tell_settings(config)
    wide(stdout).print(dry_run(config, None))


def tell_losses(info: RunInfo, deployment: Deployment) -> None:
    """Say which spans of the run are not where they should be."""
    from trackway.deploy.train import trace_losses

    for sentence in trace_losses(info, deployment.outputs):
        stderr.print(f"[yellow]traces:[/] {escape(sentence)}", soft_wrap=True)


def _tell(summary: "Summary", started: dict[str, float], deployment: Deployment, folder: Path) -> None:
    stdout.print(
        f"\naccuracy on held-out problems {summary.accuracy_before:.2f} -> {summary.accuracy_after:.2f} "
        f"in {summary.steps} steps; {summary.trajectories} trajectories, {summary.failed_trajectories} failed; "
        f"{summary.complete_traces} of {summary.traced} traces complete"
    )
    stdout.print(
        f"seconds: Ray ready at {started['ray']:.0f}, MLflow at {started['mlflow']:.0f}, all services at "
        f"{max(started.values()):.0f}; training took {summary.seconds_training:.0f}; {summary.seconds_total:.0f} in all"
    )
    stdout.print(f"reward curve   {deployment.outputs / 'reward.png'}")
    stdout.print(f"run            {folder}")
    stdout.print(f"traces         trackway ui --outputs {deployment.outputs}   then search: tags.step = '1'")


@app.command()
def ui(
    outputs: Outputs = DEMO_OUTPUTS,
    port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
) -> None:
    """Show the traces and runs of an outputs folder in MLflow, until Ctrl-C.  Example: trackway ui"""
    from trackway.deploy import mlflow_server, preflight, processes

    if not (outputs / "mlflow" / "mlflow.db").exists():
        raise UserError(f"no MLflow database in {outputs}; run `trackway demo` first, or give --outputs")
    preflight.check_port("--port", port)
    server = mlflow_server.start(outputs / "mlflow", port)
    stdout.print(f"MLflow  http://127.0.0.1:{port}   (Ctrl-C ends it)")
    try:
        while True:
            processes.check_alive(server)
            time.sleep(1.0)
    finally:
        processes.stop_tree(server)
