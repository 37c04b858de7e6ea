"""Runs `mlflow server` with its web server in the same process: `python -P server_process.py server --port 5000 ...`.

MLflow starts uvicorn as a child and waits for it, so that all of MLflow is imported and kept twice.
"""

import os
from collections.abc import Mapping, Sequence

import uvicorn  # before MLflow, which checks hosts and origins only in a process that has a web server
from mlflow import server
from mlflow.cli import cli


def _serve(command: Sequence[str], extra_env: Mapping[str, str], **options: object) -> None:
    """Run `python -m uvicorn ...` here instead of in a child; exits once the server has stopped."""
    os.environ.update(extra_env)
    uvicorn.main(command[command.index("uvicorn") + 1 :])


if __name__ == "__main__":
    server._exec_cmd = _serve  # pyright: ignore[reportPrivateImportUsage]
    cli()
