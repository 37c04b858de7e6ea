"""`trackway train | ui`: train a model, and view its run in MLflow."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import (
    OUTPUTS,
    ConfigName,
    DryRun,
    Keep,
    Outputs,
    Preflight,
    json_of,
    up_settings,
)
from trackway.deploy.commands.run_output import print_end, print_plan, run_to_end
from trackway.deploy.terminal.progress import board, print_json, stderr, stdout
from trackway.system.process import UserError

if TYPE_CHECKING:
    from trackway.run_config import UnsupportedKey
    from trackway.wire.trainer import RunInfo

app = typer.Typer()


@app.command()
def train(
    overrides: Annotated[list[str] | None, typer.Argument(help="verl's keys in Hydra's grammar: key=value.")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "--config-path", "-cp", help="YAML file, or the folder that has --config-name."),
    ] = None,
    config_name: ConfigName = "default",
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Sets trainer.experiment_name.")] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Resume this run from its last checkpoint; keys extend it or change its ranks."
        ),
    ] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="With --resume: use the last intact checkpoint.")
    ] = False,
    dry_run: DryRun = False,
    preflight: Preflight = False,
    keep: Keep = False,
    cfg: Annotated[str | None, typer.Option("--cfg", help="`job`: print the resolved configuration and exit.")] = None,
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the run at its end, or the plan and its problems")] = False,
) -> None:
    """Train on the services of the outputs folder, or on services that are started for the run and stopped at its end.

    In a folder with `trackway.yaml`, that file is the configuration. An unfinished run of the same name is
    resumed. For attached services, give paths on their volume.

    Example: trackway train --config-name tiny_demo data.train_files=d/train.parquet data.val_files=d/test.parquet
    actor_rollout_ref.model.path=d/model. Check the command first with --dry-run (errors in the configuration) or
    --preflight (also what this machine lacks).
    """
    from trackway.deploy.checks.run import check_run
    from trackway.deploy.deployment.record import load_running, recorded
    from trackway.deploy.runs.prepare import configured, prepare
    from trackway.deploy.runs.report import as_yaml, settings_report
    from trackway.deploy.runs.session import RunSession, Show
    from trackway.deploy.runs.shown import delivered, opened
    from trackway.deploy.terminal.tables import wide
    from trackway.run_config.compose import given

    words = overrides or []
    if run is not None:
        words = [*words, f"trainer.experiment_name='{_checked_name('--run', run)}'"]
    if cfg is not None:
        if cfg != "job":
            raise typer.BadParameter(f"expected job, got {cfg}", param_hint="--cfg")
        resolved = configured(words, config, config_name)
        print_json(resolved) if as_json else typer.echo(as_yaml(resolved), nl=False)
        return
    if resume is not None:
        _check_resume(_checked_name("--resume", resume), config, config_name, dry_run or preflight)
    elif skip_damaged:
        raise UserError("--skip-damaged: expected --resume with it, got none; give --resume RUN")
    if resume is not None and recorded(outputs):  # its configuration may be on other machines
        session = RunSession(load_running(outputs))
        changes = given(words)
        info = run_to_end(session, resume, lambda show: session.resume(resume, show, skip_damaged, changes), as_json)
        print_end(delivered(session, info, as_json), session.deployment, as_json)
        return
    unsupported: list[UnsupportedKey] | None = [] if dry_run or preflight else None
    subject = prepare(words, config, config_name, up_settings(outputs=outputs), unsupported=unsupported, resume=resume)
    if not as_json:
        wide(stderr).print(settings_report(subject.config, subject.decisions))
    with board(as_json) as shown:
        checked = check_run(subject, preflight or not dry_run, shown.report)
    if dry_run or preflight:
        print_plan(subject, checked, preflight, as_json)
        return
    checked.findings.refuse()

    def begin(show: Show) -> "RunInfo":
        if resume is not None:
            return session.resume(resume, show, skip_damaged, subject.changes)
        return session.submit(subject, show)

    with opened(subject, as_json, keep) as session:
        info = run_to_end(session, subject.config.trainer.experiment_name, begin, as_json)
        info = delivered(session, info, as_json)
    print_end(info, session.deployment, as_json)


def _checked_name(option: str, name: str) -> str:
    """The name of a run. Raises UserError for an invalid one."""
    from trackway.wire.base import checked_run_name

    try:
        return checked_run_name(name)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error


def _check_resume(name: str, config: Path | None, config_name: str, plan: bool) -> None:
    """Raise UserError for options that a resumed run cannot have, and say that it does not read the project's file."""
    from trackway.deploy.runs.prepare import project_file

    if plan:
        raise UserError("--dry-run and --preflight: expected a new run, got --resume; remove one of the options")
    if config is not None or config_name != "default":
        raise UserError(
            f"--resume: expected no --config and no --config-name, since {name} goes on with its own configuration, "
            f"got {config or config_name}; give the keys to change as key=value"
        )
    file = project_file(None)
    if file is not None:
        stderr.print(f"run {name} continues with its own settings, not with {file}; give changes as key=value")


@app.command()
def ui(
    outputs: Outputs = OUTPUTS,
    port: Annotated[int, typer.Option(help="Port of MLflow.")] = 5000,
    as_json: Annotated[bool, json_of("the address of MLflow and the page of the traces, once it answers")] = False,
) -> None:
    """Serve MLflow's page until Ctrl-C, and print the address of the newest run's traces.

    The database belongs to the outputs folder or to its newest run: `outputs/demo` is inside `outputs`.

    Example: trackway ui
    """
    from trackway.deploy.deployment import processes
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.local import mlflow_server, preflight
    from trackway.deploy.runs.found import find_runs

    deployment = Deployment.load(outputs.resolve())
    if deployment and deployment.attached:
        where = deployment.mlflow_uri or "its address in a browser"
        raise UserError(f"{outputs} is attached to remote services, whose MLflow runs elsewhere; open {where}")
    found = [(run.outputs, run.info.experiment_id) for run in find_runs(outputs) if run.info.experiment_id]
    folder, experiment = next(iter(found), (outputs, None))
    database = folder.resolve() / "mlflow" / "mlflow.db"
    if not database.exists():
        raise UserError(f"no MLflow database in {folder}; run `trackway demo` first, or give --outputs")
    preflight.check_port("--port", port)
    url = f"http://127.0.0.1:{port}"
    server = mlflow_server.start(database, port)
    try:
        with board(as_json) as shown:
            shown.report("mlflow", "starting")
            mlflow_server.wait_until_ready(server, url)
            shown.report("mlflow", "ready")
        page = f"{url}/#/experiments/{experiment}/traces" if experiment else url
        if as_json:
            print_json({"mlflow": url, "traces": page})
        else:
            stdout.print(f"MLflow  {page}   (Ctrl-C stops it)", soft_wrap=True)
        while True:
            processes.check_alive(server)
            time.sleep(1.0)
    finally:
        processes.stop_tree(server)
