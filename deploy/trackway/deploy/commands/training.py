"""`trackway train | ui`: train a model, and view its run in MLflow."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trackway.deploy.commands.options import DEMO_OUTPUTS, OUTPUTS, DryRun, Json, Outputs, Preflight
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.system.user_error import UserError
from trackway.wire.trainer import RunInfo

if TYPE_CHECKING:
    from trackway.deploy.checks.run import Checked, Subject
    from trackway.trainer.config import RunConfig

app = typer.Typer()


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: Annotated[str, typer.Option(help="Preset: default, ppo_trainer, tiny_demo.")] = "default",
    run: Annotated[str | None, typer.Option(help="Name of the run; default trainer.experiment_name.")] = None,
    resume: Annotated[str | None, typer.Option(help="Resume this run from its last checkpoint.")] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="With --resume: use the last intact checkpoint.")
    ] = False,
    dry_run: DryRun = False,
    preflight: Preflight = False,
    outputs: Outputs = OUTPUTS,
    as_json: Json = False,
) -> None:
    """Train on the running services. For attached services, give paths on their volume.

    Example: trackway train --config-name tiny_demo data.train_files=d/train.parquet data.val_files=d/test.parquet
    actor_rollout_ref.model.path=d/model. Check the command first with --dry-run or --preflight.
    """
    from trackway.deploy.deployment.running import load_running
    from trackway.deploy.runs import launch
    from trackway.trainer.config import compose

    if skip_damaged and resume is None:
        raise UserError("--skip-damaged: expected --resume with it, got none; give --resume NAME")
    if resume and (dry_run or preflight):
        raise UserError("--dry-run and --preflight: expected a new run, got --resume; remove one of the options")
    for option, name in (("--run", run), ("--resume", resume)):
        launch.check_run_name(option, name)
    known = Deployment.load(outputs.resolve())
    run_config = None if resume else launch.placed(compose(overrides or [], config, config_name), known)
    if (dry_run or preflight) and run_config is not None:
        if not as_json:
            _print_settings(run_config)
        print_plan(*_checked(run_config, run, known, outputs, preflight, as_json), preflight, as_json)
        return
    deployment = load_running(outputs)
    name = resume or ""
    if run_config is not None:
        _print_settings(run_config)
        _, checked = _checked(run_config, run, deployment, outputs, True, as_json)
        checked.findings.refuse()
        name = launch.start_run(deployment, run_config, run).run
    with run_bar(as_json) as bar:
        if run_config is None:
            launch.resume_run(deployment, name, bar.show, skip_damaged)
        try:
            info = launch.follow(deployment, name, bar.show)
        except KeyboardInterrupt:
            stderr.print(f"checkpoint saved; to resume: trackway train --resume {name}")
            raise
    if as_json:
        print_json(info)
        return
    stdout.print(f"run {info.run} {info.state.value} at step {info.step}; folder {info.folder}", soft_wrap=True)
    report_losses(info, deployment)


def _print_settings(config: "RunConfig") -> None:
    from trackway.deploy.config.services_for_run import decided_already
    from trackway.deploy.runs.report import settings_report, wide

    wide(stderr).print(settings_report(config, decided_already(config)))


def _checked(
    config: "RunConfig", name: str | None, known: Deployment | None, outputs: Path, load: bool, as_json: bool
) -> "tuple[Subject, Checked]":
    from trackway.deploy.checks.run import Subject, check_run
    from trackway.deploy.runs.launch import occupied

    running = known if known and (known.attached or known.started_here) else None
    taken = occupied(outputs, name or config.trainer.experiment_name) if running and not running.attached else ""
    subject = Subject(config, None, running, UpSettings.read(outputs=outputs), taken)
    with board(as_json) as shown:
        return subject, check_run(subject, load, shown.report)


def print_plan(subject: "Subject", checked: "Checked", preflight: bool, as_json: bool) -> None:
    """Print the plan and its problems. Exits with status 2 if a problem prevents the run from starting.

    Without `preflight`, only problems on any machine count.
    """
    from trackway.deploy.runs.dry_run import plan_as_json, plan_of
    from trackway.deploy.runs.report import wide

    if as_json:
        print_json(plan_as_json(checked))
    else:
        wide(stdout).print(plan_of(subject, checked))
    if checked.findings.wrong or (preflight and not checked.findings.starts_here):
        raise typer.Exit(2)


def report_losses(info: RunInfo, deployment: Deployment) -> None:
    """Print which spans, metrics and feedback of the run were lost or are still waiting."""
    from trackway.deploy.runs.losses import trace_losses, tracking_losses

    for sentence in trace_losses(info, None if deployment.attached else deployment.outputs):
        stderr.print(f"[yellow]traces:[/] {escape(sentence)}", soft_wrap=True)
    for sentence in tracking_losses(info):
        stderr.print(f"[yellow]tracking:[/] {escape(sentence)}", soft_wrap=True)


@app.command()
def ui(
    outputs: Outputs = DEMO_OUTPUTS,
    port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
) -> None:
    """Serve the MLflow UI for an outputs folder until Ctrl-C.  Example: trackway ui"""
    from trackway.deploy.deployment import processes
    from trackway.deploy.local import mlflow_server, preflight

    deployment = Deployment.load(outputs.resolve())
    if deployment and deployment.attached:
        where = deployment.mlflow_uri or "its address in a browser"
        raise UserError(f"{outputs} is attached to remote services, whose MLflow runs elsewhere; open {where}")
    if not (outputs / "mlflow" / "mlflow.db").exists():
        raise UserError(f"no MLflow database in {outputs}; run `trackway demo` first, or give --outputs")
    preflight.check_port("--port", port)
    server = mlflow_server.start(outputs / "mlflow", port)
    stdout.print(f"MLflow  http://127.0.0.1:{port}   (Ctrl-C stops it)")
    try:
        while True:
            processes.check_alive(server)
            time.sleep(1.0)
    finally:
        processes.stop_tree(server)
