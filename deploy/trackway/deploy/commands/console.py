"""`trackway console`: a web page over runs, their trajectories and their tokens."""

import os
from importlib.util import find_spec
from typing import Annotated

import typer

from trackway.deploy.commands.options import OUTPUTS, Outputs, json_of
from trackway.deploy.terminal.console import print_json, stdout
from trackway.system import free_port

app = typer.Typer()


@app.command()
def console(
    outputs: Outputs = OUTPUTS,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for other machines, with tokens.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8100,
    as_json: Annotated[bool, json_of("the console's URL and its outputs folder, before it starts to serve")] = False,
) -> None:
    """Serve a web page over runs, steps, trajectories and tokens until Ctrl-C. It reads files, and changes nothing.

    Example: trackway console --outputs outputs/demo
    """
    if find_spec("duckdb") is None:  # imported at the first query, which is too late to name the extra
        raise ModuleNotFoundError("No module named 'duckdb'", name="duckdb")

    from trackway.console.app import create_app
    from trackway.deploy.local import preflight, single_service

    port = port or free_port()
    preflight.check_port("--port", port)
    os.nice(10)  # a training run on the same machine goes first
    application = create_app(outputs)
    url = f"http://{host}:{port}/"
    if as_json:
        print_json({"console": url, "outputs": str(outputs)})
    else:
        stdout.print(f"console  {url}   (Ctrl-C stops it)", soft_wrap=True)
    single_service.run_app(application, host, port)
