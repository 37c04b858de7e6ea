"""`trackway up | serve | attach | down | clean | status | scale`: manage the services."""

import sys
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from trackway.deploy.commands.options import OUTPUTS, Outputs, Wait, json_of, up_settings
from trackway.deploy.terminal.progress import board, print_json, stderr, stdout
from trackway.system import free_port, visible
from trackway.system.process import UserError

if TYPE_CHECKING:
    from trackway.deploy.deployment.record import Deployment

app = typer.Typer()

MOST_NOTES = 8
"""Undelivered metrics and feedback that `status` lists before it shortens the list."""


@app.command()
def up(
    outputs: Outputs = OUTPUTS,
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file; default: this machine's CPU.")] = None,
    model_path: Annotated[Path | None, typer.Option(help="Hugging Face folder of the policy.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the services; default 8000, 0 for any free port.")] = None,
    dashboard_port: Annotated[
        int | None, typer.Option(help="Port of Ray Serve's REST API; default 8265, 0 for any.")
    ] = None,
    ray_port: Annotated[int | None, typer.Option(help="Port of Ray's control store; default 6379, 0 for any.")] = None,
    mlflow_port: Annotated[int | None, typer.Option(help="Port of the MLflow server; default 5000, 0 for any.")] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="MLflow server, or sqlite:///file.db; default MLFLOW_TRACKING_URI.")
    ] = None,
    tokens_file: Annotated[
        Path | None, typer.Option(help="JSON file of bearer tokens; TRACKWAY_TOKEN must be one of them.")
    ] = None,
    reload: Annotated[
        bool,
        typer.Option("--reload", help="Watch own code until Ctrl-C, and restart the services whose code changed."),
    ] = False,
    during_runs: Annotated[
        bool, typer.Option("--during-runs", help="With --reload: also restart them while runs are active.")
    ] = False,
    as_json: Annotated[bool, json_of("addresses, folders and processes of the deployment")] = False,
) -> None:
    """Start Ray, MLflow and the five services, and wait until they are ready.

    In a folder with `trackway.yaml`, they are the services of that project, with its own code. With --reload on running
    services, only the watch is started.

    Example: trackway up --port 0
    """
    from trackway.deploy.deployment.record import Deployment
    from trackway.deploy.local.up import bring_up
    from trackway.deploy.runs.prepare import prepare, project_file, to_start

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
    deployment = Deployment.load(outputs.resolve()) if reload else None
    if deployment is None or deployment.attached or not deployment.started_here:
        serve_config = None
        if project_file(None) is not None and (subject := prepare([], None, "default", settings)).services:
            started, serve_config = to_start(subject)
            if "model_path" not in settings.model_fields_set:
                settings = settings.model_copy(update={"model_path": started.model_path})
        with board(as_json) as shown:
            deployment = bring_up(settings, shown.report, serve_config)
    if as_json:
        print_json(deployment.model_dump(mode="json", exclude={"token", "serve_config"}))
    else:
        stdout.print(f"services  {deployment.base_url}/<rollout|tools|reward|agent|trainer>/docs", soft_wrap=True)
        stdout.print(f"MLflow    {deployment.mlflow_uri}", soft_wrap=True)
        if deployment.tinker_url:
            stdout.print(f"Tinker    export TINKER_BASE_URL={deployment.tinker_url}", soft_wrap=True)
        stdout.print("next      trackway status | trackway train --config-name tiny_demo ... | trackway down")
    if reload:
        _reload_on_changes(deployment, as_json, during_runs)


def _reload_on_changes(deployment: "Deployment", as_json: bool, during_runs: bool) -> None:
    """Restart services when their code changes, until Ctrl-C, which leaves them running."""
    from trackway.deploy.local.reload import changes
    from trackway.deploy.local.reload import reload as restart_changed
    from trackway.deploy.runs.session import RunSession

    active_runs = list if during_runs else RunSession(deployment).active
    stderr.print("watching own code; Ctrl-C ends the watch and leaves the services running")
    with suppress(KeyboardInterrupt):
        for _ in changes(deployment.serve_config):
            try:
                with board(as_json) as shown:
                    restart_changed(deployment, shown.report, active_runs=active_runs)
            except UserError as error:
                stderr.print(escape(str(error)), soft_wrap=True)


class Service(StrEnum):
    """The services that `serve` starts alone."""

    AGENT = "agent"
    ROLLOUT = "rollout"
    TOOLS = "tools"
    REWARD = "reward"
    TRAINER = "trainer"


@app.command()
def serve(
    service: Annotated[Service, typer.Argument(help="Service to start.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines, with tokens.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8000,
    config: Annotated[Path | None, typer.Option(help="Ray Serve config file; takes the service's args.")] = None,
    as_json: Annotated[bool, json_of("the name of the service and its URL, before it starts to serve")] = False,
) -> None:
    """Start one service in this process, without Ray, until Ctrl-C. Settings come from TRACKWAY_... variables.

    Example: trackway serve tools --port 8001
    """
    from trackway.deploy.local import preflight, single_service

    port = port or free_port()
    preflight.check_port("--port", port)
    service_app = single_service.app_of(service.value, config)
    url = f"http://{host}:{port}"
    if as_json:
        print_json({"service": service.value, "url": url})
    else:
        stdout.print(f"{service.value}  {url}/docs   (Ctrl-C stops it)", soft_wrap=True)
    single_service.run_app(service_app, host, port)


@app.command()
def attach(
    base_url: Annotated[
        str | None, typer.Option(help="Address of the services, each below its own prefix: http://127.0.0.1:8000.")
    ] = None,
    service_url: Annotated[
        list[str] | None,
        typer.Option(help="Address of one service that is not there: tools=http://127.0.0.1:8001. Repeat it."),
    ] = None,
    ray_url: Annotated[
        str | None, typer.Option(help="Ray's REST API, used by `scale` and `status`: http://127.0.0.1:8265.")
    ] = None,
    mlflow_uri: Annotated[
        str | None, typer.Option(help="MLflow, used by `trackway traces`.", envvar="MLFLOW_TRACKING_URI")
    ] = None,
    outputs: Outputs = OUTPUTS,
    wait: Wait = 0.0,
    as_json: Annotated[bool, json_of("addresses and folders of the deployment")] = False,
) -> None:
    """Use services that run elsewhere, such as on Kubernetes or in containers. Starts nothing.

    Commands authenticate with TRACKWAY_TOKEN at the services, and with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH at Ray.

    Example: trackway attach --base-url http://127.0.0.1:8000 --ray-url http://127.0.0.1:8265
    """
    from trackway.deploy.deployment import attach as attaching

    with board(as_json) as shown:
        deployment = attaching.attach(base_url, service_url or [], ray_url, mlflow_uri, outputs, wait, shown.report)
    if as_json:
        print_json(deployment.model_dump(mode="json", exclude={"token", "serve_config", "processes"}))
        return
    stdout.print(f"attached  {outputs} to {deployment.address}", soft_wrap=True)
    stdout.print("next      trackway status | trackway train ... | trackway demo --attached ... | trackway down")


@app.command()
def down(
    outputs: Outputs = OUTPUTS, as_json: Annotated[bool, json_of("whether services were stopped or detached")] = False
) -> None:
    """Stop what `trackway up` started. Attached services keep running.  Example: trackway down"""
    from trackway.deploy.deployment.record import Deployment

    deployment = Deployment.load(outputs.resolve())
    if deployment is not None:
        from trackway.deploy.local.up import take_down

        with board(as_json or deployment.attached) as shown:
            take_down(deployment, shown.report)
    if as_json:
        stopped = bool(deployment and not deployment.attached)
        print_json({"outputs": str(outputs), "stopped": stopped, "detached": bool(deployment and deployment.attached)})
    elif deployment is None:
        stdout.print(f"nothing runs for {outputs}", soft_wrap=True)
    elif deployment.attached:
        stdout.print(f"detached from the services at {deployment.address}; they keep running", soft_wrap=True)


@app.command()
def clean(
    outputs: Outputs = OUTPUTS,
    everything: Annotated[bool, typer.Option("--all", help="Also remove runs, metrics and traces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: Annotated[bool, json_of("the removed paths and the number of bytes")] = False,
) -> None:
    """Remove published weights, logs and damaged checkpoints from an outputs folder whose services are down.

    Example: trackway clean --outputs outputs/demo --all
    """
    from trackway.deploy.runs.found import parts, remove
    from trackway.deploy.terminal.tables import size_of, table

    found = parts(outputs, everything)
    total = size_of(sum(part.size for part in found))
    if found and not yes:
        if as_json or not sys.stdin.isatty():
            raise UserError(
                f"expected --yes to remove {total} from {outputs} without asking, got no terminal to ask on"
            )
        rows = [(str(part.path.relative_to(outputs)), size_of(part.size), part.what) for part in found]
        stdout.print(table("", ("", "size", "what"), rows))
        if not typer.confirm(f"remove these {total} from {outputs}?"):
            raise typer.Exit(1)
    remove(found)
    if as_json:
        print_json({"removed": [str(part.path) for part in found], "bytes": sum(part.size for part in found)})
        return
    stdout.print(f"removed {total} from {outputs}" if found else f"nothing to remove in {outputs}", soft_wrap=True)


@app.command()
def status(
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the services with their replicas, weights, active runs and notes")] = False,
) -> None:
    """Show services, replicas, weight versions, runs and undelivered metrics.  Example: trackway status --json"""
    from trackway.deploy.deployment.record import load_running
    from trackway.deploy.deployment.serve_api import service_statuses

    deployment = load_running(outputs)
    from trackway.deploy.runs.losses import active_runs

    statuses = service_statuses(deployment)
    for service_status in statuses:
        if service_status.service == "trainer" and service_status.replicas:
            service_status.runs, service_status.notes = active_runs(deployment)
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
    for info in (info for service_status in statuses for info in service_status.runs):
        policy = f"policy {info.policy}" if info.policy else "the default policy"
        line = f"run {info.run}: {info.state}, step {info.progress}, {policy}"
        stdout.print(escape(visible(line)), soft_wrap=True)
    notes = [note for service_status in statuses for note in service_status.notes]
    for note in notes[:MOST_NOTES]:
        stdout.print(f"[yellow]tracking:[/] {escape(note)}", soft_wrap=True)
    if len(notes) > MOST_NOTES:
        stdout.print(f"[yellow]tracking:[/] and {len(notes) - MOST_NOTES} more; use --json to list all")
    stdout.print(f"services {deployment.address}   MLflow {deployment.mlflow_uri or 'unknown'}", soft_wrap=True)


@app.command()
def scale(
    service: Annotated[str, typer.Argument(help="rollout, tools, reward or agent.")],
    replicas: Annotated[str, typer.Argument(help="A fixed number, or autoscaling bounds such as 1-4.")],
    outputs: Outputs = OUTPUTS,
    as_json: Annotated[bool, json_of("the replicas of the service")] = False,
) -> None:
    """Change the number of replicas of a running service.  Example: trackway scale rollout 2"""
    from trackway.deploy.config.serve_config import Replicas
    from trackway.deploy.deployment import serve_api
    from trackway.deploy.deployment.record import load_running

    wanted = Replicas.parse(replicas)
    if service == "trainer" and wanted.most != 1:
        raise UserError(f"trainer: expected exactly one replica (a run has one learner), got {wanted}; scale another")
    deployment = load_running(outputs)
    with board(as_json) as shown:
        shown.report(service, f"scaling to {wanted}")
        scaled = serve_api.scale(deployment, service, wanted)
        shown.report(service, "ready")
    if as_json:
        print_json([replica.model_dump(mode="json") for replica in scaled])
        return
    for replica in scaled:
        weights = f"weights {replica.weights.version}" if replica.weights else ""
        stdout.print(f"{service} {replica.health.replica} pid {replica.health.pid} {weights}")
