"""`trackway console`: a web page over runs, their trajectories and their tokens."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, get_args

import typer

from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.terminal.progress import print_json, stdout
from trackway.system import free_port

app = typer.Typer()


@app.command()
def console(
    outputs: Outputs = OUTPUTS,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines, with tokens.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8100,
    services_url: Annotated[
        str | None,
        typer.Option(
            help="Address of running services, each below its own prefix; default: those of `trackway up` or `attach`."
        ),
    ] = None,
    as_json: Annotated[bool, json_of("the console's URL and its outputs folder, before it starts to serve")] = False,
) -> None:
    """Serve a web page over runs, steps, trajectories and tokens until Ctrl-C. It reads files, and changes nothing.

    Beside running services it shows how they are, and passes on single requests with the token of the browser's user.

    Example: trackway console --outputs outputs/demo
    """
    if find_spec("duckdb") is None:  # imported at the first query, which is too late to name the extra
        raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")

    from trackway.console.app import create_app
    from trackway.deploy.local import preflight, single_service

    port = port or free_port()
    preflight.check_port("--port", port)
    os.nice(10)  # a training run on the same machine goes first
    application = create_app(outputs, services=services_of(outputs, services_url))
    url = f"http://{host}:{port}/"
    if as_json:
        print_json({"console": url, "outputs": str(outputs)})
    else:
        stdout.print(f"console  {url}   (Ctrl-C stops it)", soft_wrap=True)
    single_service.run_app(application, host, port)


def services_of(outputs: Path, services_url: str | None) -> dict[str, str]:
    """Addresses of the running services by name. None where nothing was started or attached."""
    from trackway.deploy.deployment.attach import address
    from trackway.deploy.deployment.record import Deployment
    from trackway.wire.service import ServiceName

    if services_url is not None:
        base = address("--services-url", services_url)
        return {service: f"{base}/{service}" for service in get_args(ServiceName)}
    deployment = Deployment.load(outputs.resolve())
    if deployment is None or not (deployment.attached or deployment.started_here):
        return {}
    return {service: deployment.url(service) for service in deployment.services}
