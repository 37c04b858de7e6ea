"""`trackway train | ui`: train a model, and view its run in MLflow."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import (
    DEMO_OUTPUTS,
    OUTPUTS,
    ConfigName,
    DryRun,
    Outputs,
    Preflight,
    json_of,
    up_settings,
)
from trackway.deploy.commands.run_output import print_end, print_plan, report_interrupted, wait_for_delivery
from trackway.deploy.commands.standalone_run import train_standalone
from trackway.deploy.terminal.console import board, print_json, run_bar, stderr, stdout
from trackway.system.user_error import UserError

if TYPE_CHECKING:
    from trackway.deploy.checks.run import Checked, Subject
    from trackway.deploy.deployment.record import Deployment
    from trackway.trainer.config import RunConfig, UnsupportedKey

app = typer.Typer()


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file, or the folder that has --config-name.")] = None,
    config_name: ConfigName = "default",
    run: Annotated[str | None, typer.Option(help="Name of the run; default trainer.experiment_name.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Resume this run from its last checkpoint; keys extend it or change its ranks.")
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="With --resume: use the last intact checkpoint.")
    ] = False,
    dry_run: DryRun = False,
    preflight: Preflight = False,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the run at its end, or the plan and its problems")] = False,
) -> None:
    """Train on the running services. For attached services, give paths on their volume.

    In a folder with `trackway.yaml`, that file is the configuration, and services are started for the run when none is
    running.

    Example: trackway train --config-name tiny_demo data.train_files=d/train.parquet data.val_files=d/test.parquet
    actor_rollout_ref.model.path=d/model. Check the command first with --dry-run or --preflight.
    """
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.deployment.running import load_running
    from trackway.deploy.runs import launch, project
    from trackway.trainer.config.compose import given

    if skip_damaged and resume is None:
        raise UserError("--skip-damaged: expected --resume with it, got none; give --resume NAME")
    if resume and (dry_run or preflight):
        raise UserError("--dry-run and --preflight: expected a new run, got --resume; remove one of the options")
    for option, name in (("--run", run), ("--resume", resume)):
        launch.check_run_name(option, name)
    known = Deployment.load(outputs.resolve())
    if resume and _running(known) and (config is not None or config_name != "default"):
        raise UserError(
            f"--resume: expected no --config and no --config-name, since {resume} goes on with its own configuration "
            f"on the running services, got {config or config_name}; give the keys to change as key=value"
        )
    file = project.project_file(config, config_name)
    if file is not None and resume is not None:
        stderr.print(f"run {resume} continues with its own settings, not with {file}; give changes as key=value")
    if file is not None and not _running(known):
        _train_project(file, overrides or [], outputs, run, resume, skip_damaged, dry_run, preflight, as_json)
        return
    unsupported: list[UnsupportedKey] = []
    listed = unsupported if dry_run or preflight else None
    run_config = None if resume else project.configured(overrides or [], config, config_name, known, listed)
    if (dry_run or preflight) and run_config is not None:
        if not as_json:
            _print_settings(run_config)
        print_plan(*_checked(run_config, run, known, outputs, preflight, as_json, unsupported), preflight, as_json)
        return
    deployment = load_running(outputs)
    name = resume or ""
    if run_config is not None:
        _print_settings(run_config)
        _, checked = _checked(run_config, run, deployment, outputs, True, as_json)
        checked.findings.refuse()
        name = launch.start_run(deployment, run_config, run).run
    changes = given(overrides or [])
    with run_bar(as_json) as bar:
        if run_config is None:
            launch.resume_run(deployment, name, bar.show, skip_damaged, changes)
        try:
            info = launch.follow(deployment, name, bar.show)
        except KeyboardInterrupt:
            report_interrupted(name, deployment, f"to resume: trackway train --resume {name}", stopping=False)
            raise
    info = wait_for_delivery(info, deployment, as_json, stopping=False)
    print_end(info, deployment, as_json)


def _running(known: "Deployment | None") -> bool:
    return known is not None and (known.attached or known.started_here)


def _train_project(
    file: Path,
    overrides: list[str],
    outputs: Path,
    run: str | None,
    resume: str | None,
    skip_damaged: bool,
    dry_run: bool,
    preflight: bool,
    as_json: bool,
) -> None:
    """Train a project with services of its own; `resume` resumes that run."""
    from trackway.deploy.runs.launch import occupied
    from trackway.deploy.runs.standalone import prepare
    from trackway.trainer.run_state.folder import RunFolder

    if resume is not None and not RunFolder(outputs.resolve() / resume).exists:
        raise UserError(f"--resume: expected a run in {outputs}, got {resume}; `trackway train` starts one")
    named = [f"trainer.experiment_name='{run}'"] if run else []
    prepared = prepare([*overrides, *named], file, "default", outputs, plan_only=dry_run or preflight, resume=resume)
    if run is not None and prepared.left_off() is not None:
        raise UserError(occupied(outputs, run))
    train_standalone(
        prepared, dry_run=dry_run, preflight=preflight, keep=False, as_json=as_json, skip_damaged=skip_damaged
    )


def _print_settings(config: "RunConfig") -> None:
    from trackway.deploy.config.services_for_run import decided_already
    from trackway.deploy.runs.report import settings_report
    from trackway.deploy.terminal.tables import wide

    wide(stderr).print(settings_report(config, decided_already(config)))


def _checked(
    config: "RunConfig",
    name: str | None,
    known: "Deployment | None",
    outputs: Path,
    load: bool,
    as_json: bool,
    unsupported: "Sequence[UnsupportedKey]" = (),
) -> "tuple[Subject, Checked]":
    from trackway.deploy.checks.run import Subject, check_run
    from trackway.deploy.runs.launch import occupied

    running = known if _running(known) else None
    taken = occupied(outputs, name or config.trainer.experiment_name) if running and not running.attached else ""
    subject = Subject(config, None, running, up_settings(outputs=outputs), taken, unsupported)
    with board(as_json) as shown:
        return subject, check_run(subject, load, shown.report)


@app.command()
def ui(
    outputs: Outputs = DEMO_OUTPUTS,
    port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
    as_json: Annotated[bool, json_of("the address of MLflow and the page of the traces, once it answers")] = False,
) -> None:
    """Serve the MLflow UI for an outputs folder until Ctrl-C, and print the page of its newest run's traces.

    Example: trackway ui
    """
    from trackway.deploy.deployment import processes
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.local import mlflow_server, preflight

    deployment = Deployment.load(outputs.resolve())
    if deployment and deployment.attached:
        where = deployment.mlflow_uri or "its address in a browser"
        raise UserError(f"{outputs} is attached to remote services, whose MLflow runs elsewhere; open {where}")
    if not (outputs / "mlflow" / "mlflow.db").exists():
        raise UserError(f"no MLflow database in {outputs}; run `trackway demo` first, or give --outputs")
    preflight.check_port("--port", port)
    url = f"http://127.0.0.1:{port}"
    server = mlflow_server.start(outputs / "mlflow", port)
    try:
        with board(as_json) as shown:
            shown.report("mlflow", "starting")
            mlflow_server.wait_until_ready(server, url)
            shown.report("mlflow", "ready")
        page = f"{url}{_traces_page(outputs)}"
        if as_json:
            print_json({"mlflow": url, "traces": page})
        else:
            stdout.print(f"MLflow  {page}   (Ctrl-C stops it)", soft_wrap=True)
        while True:
            processes.check_alive(server)
            time.sleep(1.0)
    finally:
        processes.stop_tree(server)


def _traces_page(outputs: Path) -> str:
    """The path of MLflow's page with the traces of the newest run; empty when no run has an experiment."""
    from trackway.deploy.runs.found import find_runs

    experiments = (run.info.experiment_id for run in find_runs(outputs))
    newest = next((experiment for experiment in experiments if experiment), None)
    return f"/#/experiments/{newest}/traces" if newest else ""
