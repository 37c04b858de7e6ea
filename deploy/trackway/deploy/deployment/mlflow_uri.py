"""Choice of the MLflow that a command reads traces from."""

import os
from pathlib import Path

from trackway.deploy.deployment.record import Deployment
from trackway.system.user_error import UserError


def store_uri(outputs: Path, explicit: str | None = None, fallback: str | None = None) -> str:
    """The MLflow URI to read from. The first that exists of: `explicit`; the outputs folder's MLflow (the running
    server, or its database); `fallback`; MLFLOW_TRACKING_URI.

    Raises:
        UserError: there is none.
    """
    deployment = Deployment.load(outputs.resolve())
    if explicit is None and deployment and deployment.mlflow_uri and (deployment.attached or deployment.started_here):
        return deployment.mlflow_uri
    database = outputs.resolve() / "mlflow" / "mlflow.db"
    stored = f"sqlite:///{database}" if database.is_file() else None
    uri = explicit or stored or fallback or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            f"no MLflow database in {outputs}; set --outputs to the folder of a deployment or demo, or --mlflow-uri"
        )
    return uri
