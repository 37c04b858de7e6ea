"""A local MLflow server that runs until it is stopped: the tracing's own keeper, on a port that is known before."""

from pathlib import Path

from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system.user_error import UserError
from trackway.tracing.local_mlflow import client as local_mlflow


def start(folder: Path, port: int) -> ProcessRecord:
    """As `start_for`, for `<folder>/mlflow.db`."""
    return start_for(folder.resolve() / "mlflow.db", port)


def start_for(database: Path, port: int) -> ProcessRecord:
    """Start MLflow on 127.0.0.1 for a database; the server that workers started there makes way.

    Raises:
        UserError: the database has a server already that was started like this one, or that does not end.
    """
    try:
        files = local_mlflow.make_way(database)
    except local_mlflow.LocalMlflowError as error:
        raise UserError(str(error)) from error
    return processes.start("mlflow", local_mlflow.keeper_command(database, port), {}, files.log)
