"""The MLflow whose traces a command reads."""

import os
from pathlib import Path

from trackway.deploy.deployment.record import Deployment
from trackway.system.user_error import UserError


def store_uri(outputs: Path, given: str | None = None, otherwise: str | None = None) -> str:
    """The MLflow to read from: the given one, else that of the outputs folder (its running server or that of attached
    services, else its database), else the other one, else MLFLOW_TRACKING_URI.

    Raises:
        UserError: when there is none.
    """
    deployment = Deployment.load(outputs.resolve())
    if given is None and deployment and deployment.mlflow_uri and (deployment.attached or deployment.started_here):
        return deployment.mlflow_uri
    database = outputs.resolve() / "mlflow" / "mlflow.db"
    own = f"sqlite:///{database}" if database.is_file() else None
    uri = given or own or otherwise or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise UserError(
            f"no MLflow database in {outputs}; give --outputs the folder of a deployment or a demo, or --mlflow-uri"
        )
    return uri
