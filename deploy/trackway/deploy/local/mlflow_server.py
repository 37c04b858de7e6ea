"""A local MLflow server that runs until it is stopped, on a fixed port."""

from pathlib import Path

from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system.user_error import UserError
from trackway.tracing.local_mlflow import client as local_mlflow


def start(folder: Path, port: int) -> ProcessRecord:
    """Like `start_for`, for `<folder>/mlflow.db`."""
    return start_for(folder.resolve() / "mlflow.db", port)


def start_for(database: Path, port: int) -> ProcessRecord:
    """Start MLflow on 127.0.0.1 for a database, in place of a shared server that workers started for it.

    Raises:
        UserError: the database already has a server started by this function, or the shared server does not exit.
    """
    try:
        files = local_mlflow.stop_shared_server(database)
    except local_mlflow.LocalMlflowError as error:
        raise UserError(str(error)) from error
    return processes.start("mlflow", local_mlflow.server_command(database, port), {}, files.log)
