"""A local MLflow server that runs until it is stopped, on a fixed port."""

import os
import time
from pathlib import Path

from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system import without_secrets
from trackway.system.process import UserError
from trackway.tracing.local_mlflow import client as local_mlflow

START_DEADLINE_S = 180.0
"""Longest wait for a server's first answer. The first start of a database migrates it."""


def start(database: Path, port: int) -> ProcessRecord:
    """Start MLflow on 127.0.0.1 for a database, in place of a shared server that workers started for it.

    Raises:
        UserError: the database already has a server started by this function, or the shared server does not exit.
    """
    try:
        files = local_mlflow.stop_shared_server(database)
    except local_mlflow.LocalMlflowError as error:
        raise UserError(str(error)) from error
    command = local_mlflow.server_command(database, port)
    return processes.start("mlflow", command, without_secrets(os.environ), files.log)


def answers(url: str) -> bool:
    """Return whether an MLflow server answers at this URL."""
    return processes.answers(f"{url}/health")


def wait_until_ready(server: ProcessRecord, url: str) -> None:
    """Wait until a started server answers. Raises UserError if its process exits, or after `START_DEADLINE_S`."""
    deadline = time.monotonic() + START_DEADLINE_S
    while not answers(url):
        processes.check_alive(server)
        if time.monotonic() > deadline:
            raise UserError(
                f"expected MLflow to answer at {url} within {START_DEADLINE_S:.0f} s, got no answer; its log is "
                f"{server.log}"
            )
        time.sleep(0.25)
