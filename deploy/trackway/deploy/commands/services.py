"""`trackway up | attach | down | status | scale`: manage the services."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trackway.deploy.commands.options import OUTPUTS, Json, Outputs, Wait, up_settings
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.terminal.console import board, print_json, stdout
from trackway.system.user_error import UserError

app = typer.Typer()

MOST_NOTES = 8
"""Undelivered metrics and feedback that `status` lists before it shortens the list."""


@app.command()
def up(
    outputs: Outputs = OUTPUTS,
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file; default deploy/cpu.yaml.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Hugging Face folder of the policy.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the services; default 8000, 0 for any free port.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of Ray's dashboard; default 8265, 0 for any.")
    ] = None,
    ray_port: Annotated[int | None, typer.Option(help="Port of Ray's control store; default 6379, 0 for any.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Port of the MLflow server; default 5000, 0 for any.")] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="MLflow server, or sqlite:///file.db; default MLFLOW_TRACKING_URI.")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(help="JSON file of bearer tokens; TRACKWAY_TOKEN must be one of them.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Start Ray, MLflow and the five services, and wait until they are ready.  Example: trackway up --port 0"""
    from trackway.deploy.local.up import bring_up

    settings = up_settings(
        outputs=outputs,
        config=config,
        model_path=model_path,
        port=port,
        dashboard_port=dashboard_port,
        ray_port=ray_port,
        mlflow_port=mlflow_port,
        mlflow_uri=mlflow_uri,
        tokens_file=tokens_file,
    )
    with board(as_json) as shown:
        deployment = bring_up(settings, shown.report)
    if as_json:
        print_json(deployment.model_dump(mode="json", exclude={"token", "serve_config"}))
        return
    stdout.print(f"services  {deployment.base_url}/<rollout|tools|reward|agent|trainer>/docs", soft_wrap=True)
    stdout.print(f"MLflow    {deployment.mlflow_uri}", soft_wrap=True)
    stdout.print("next      trackway status | trackway train --config-name tiny_demo ... | trackway down")


@app.command()
def attach(
    base_url: Annotated[str, typer.Option(help="Address of the services: http://127.0.0.1:8000.")],
    ray_url: Annotated[
        str | None, typer.Option(help="Ray's REST API, used by `scale` and `status`: http://127.0.0.1:8265.")
    ] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="MLflow, used by `trackway traces`.", envvar="MLFLOW_TRACKING_URI")
    ] = None,
    outputs: Outputs = OUTPUTS,
    wait: Wait = 0.0,
    as_json: Json = False,
) -> None:
    """Use services that run elsewhere, such as on Kubernetes. Starts nothing.

    Commands authenticate with TRACKWAY_TOKEN at the services, and with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH at Ray.

    Example: trackway attach --base-url http://127.0.0.1:8000 --ray-url http://127.0.0.1:8265
    """
    from trackway.deploy.deployment import attach as attaching

    with board(as_json) as shown:
        deployment = attaching.attach(base_url, ray_url, mlflow_uri, outputs, wait, shown.report)
    if as_json:
        print_json(deployment.model_dump(mode="json", exclude={"token", "serve_config", "processes"}))
        return
    stdout.print(f"attached  {outputs} to {deployment.base_url}", soft_wrap=True)
    stdout.print("next      trackway status | trackway train ... | trackway demo --attached ... | trackway down")


@app.command()
def down(outputs: Outputs = OUTPUTS) -> None:
    """Stop what `trackway up` started. Attached services keep running.  Example: trackway down"""
    from trackway.deploy.local.up import take_down

    deployment = Deployment.load(outputs.resolve())
    if deployment is None:
        stdout.print(f"nothing runs for {outputs}", soft_wrap=True)
        return
    if deployment.attached:
        take_down(deployment)
        stdout.print(f"detached from the services at {deployment.base_url}; they keep running", soft_wrap=True)
        return
    with board(quiet=False) as shown:
        take_down(deployment, shown.report)


@app.command()
def status(outputs: Outputs = OUTPUTS, as_json: Json = False) -> None:
    """Show services, replicas, weight versions and undelivered metrics.  Example: trackway status --json"""
    from trackway.deploy.deployment.running import load_running
    from trackway.deploy.deployment.status import service_statuses
    from trackway.deploy.runs.losses import run_notes

    deployment = load_running(outputs)
    statuses = service_statuses(deployment)
    for service_status in statuses:
        service_status.notes = (
            run_notes(deployment) if service_status.service == "trainer" and service_status.replicas else []
        )
    if as_json:
        print_json([service_status.model_dump(mode="json") for service_status in statuses])
        return
    table = Table("service", "status", "replica", "ready", "weights", "pid", box=None)
    for service_status in statuses:
        for replica in service_status.replicas or [None]:
            if replica is None:
                table.add_row(
                    service_status.service, service_status.status, "-", escape(service_status.message[:80]), "", ""
                )
                continue
            weights = f"{replica.weights.version} of {replica.weights.latest}" if replica.weights else ""
            ready = "yes" if replica.ready.ready else escape(replica.ready.reason)
            table.add_row(
                service_status.service,
                service_status.status,
                replica.health.replica,
                ready,
                weights,
                str(replica.health.pid),
            )
    stdout.print(table)
    notes = [note for service_status in statuses for note in service_status.notes]
    for note in notes[:MOST_NOTES]:
        stdout.print(f"[yellow]tracking:[/] {escape(note)}", soft_wrap=True)
    if len(notes) > MOST_NOTES:
        stdout.print(f"[yellow]tracking:[/] and {len(notes) - MOST_NOTES} more; use --json to list all")
    stdout.print(f"services {deployment.base_url}   MLflow {deployment.mlflow_uri or 'unknown'}", soft_wrap=True)


@app.command()
def scale(
    service: Annotated[str, typer.Argument(help="rollout, tools, reward or agent.")],
    replicas: Annotated[str, typer.Argument(help="A fixed number, or autoscaling bounds such as 1-4.")],
    outputs: Outputs = OUTPUTS,
    as_json: Json = False,
) -> None:
    """Change the number of replicas of a running service.  Example: trackway scale rollout 2"""
    from trackway.deploy.config.serve_config import Replicas
    from trackway.deploy.deployment import status as statuses
    from trackway.deploy.deployment.running import load_running

    wanted = Replicas.parse(replicas)
    if service == "trainer" and wanted.most != 1:
        raise UserError(f"trainer: expected exactly one replica (a run has one learner), got {wanted}; scale another")
    deployment = load_running(outputs)
    with board(as_json) as shown:
        shown.report(service, f"scaling to {wanted}")
        scaled = statuses.scale(deployment, service, wanted)
        shown.report(service, "ready")
    if as_json:
        print_json([replica.model_dump(mode="json") for replica in scaled])
        return
    for replica in scaled:
        weights = f"weights {replica.weights.version}" if replica.weights else ""
        stdout.print(f"{service} {replica.health.replica} pid {replica.health.pid} {weights}")
