"""`trackway train | ui`: a run, and looking at it afterwards."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_OUTPUTS, OUTPUTS, Json, Outputs
from trackway.deploy.console import print_json, run_bar, stderr, stdout
from trackway.deploy.errors import UserError
from trackway.deploy.settings import Deployment
from trackway.wire.trainer import RunInfo

if TYPE_CHECKING:
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
    """Train on the running services; on attached ones, with paths of their volume.

    Example: trackway train --config-name tiny_demo data.train_files=d/train.parquet data.val_files=d/test.parquet
    """
    from trackway.deploy import train as training
    from trackway.deploy.running import load_running
    from trackway.trainer.config import compose

    known = Deployment.load(outputs.resolve())
    run_config = None if resume else training.placed(compose(overrides or [], config, config_name), known)
    if dry_run and run_config is not None:
        _tell_plan(run_config, known)
        return
    deployment = load_running(outputs)
    name = resume or ""
    if run_config is not None:
        _tell_settings(run_config)
        name = training.start_run(deployment, run_config, run).run
    with run_bar(as_json) as bar:
        if run_config is None:
            training.resume_run(deployment, name, bar.show)
        try:
            info = training.follow(deployment, name, bar.show)
        except KeyboardInterrupt:
            stderr.print(f"saved; go on with: trackway train --resume {name}")
            raise
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}", soft_wrap=True)
    tell_losses(info, deployment)


def _tell_settings(config: "RunConfig") -> None:
    from trackway.deploy.run_report import settings_report, wide
    from trackway.deploy.run_services import decided_already

    wide(stderr).print(settings_report(config, decided_already(config)))


def _tell_plan(config: "RunConfig", deployment: Deployment | None) -> None:
    from trackway.deploy.dry_run import dry_run
    from trackway.deploy.run_report import wide

    _tell_settings(config)
    wide(stdout).print(dry_run(config, None, elsewhere=bool(deployment and deployment.attached)))


def tell_losses(info: RunInfo, deployment: Deployment) -> None:
    """Say which spans of the run are not where they should be."""
    from trackway.deploy.train import trace_losses

    for sentence in trace_losses(info, None if deployment.attached else deployment.outputs):
        stderr.print(f"[yellow]traces:[/] {escape(sentence)}", soft_wrap=True)


@app.command()
def ui(
    outputs: Outputs = DEMO_OUTPUTS,
    port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
) -> None:
    """Show the traces and runs of an outputs folder in MLflow, until Ctrl-C.  Example: trackway ui"""
    from trackway.deploy import mlflow_server, preflight, processes

    deployment = Deployment.load(outputs.resolve())
    if deployment and deployment.attached:
        where = deployment.mlflow_uri or "the address where it runs"
        raise UserError(f"{outputs} is attached to services that run elsewhere, and so does their MLflow; open {where}")
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
