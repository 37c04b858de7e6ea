"""Settings of a local deployment: ports, folders and limits."""

import os
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from trackway.deploy.bundled import CPU_CONFIG, TINY_MODEL
from trackway.system.process import UserError


class UpSettings(BaseSettings):
    """Ports, folders and limits of a local deployment. TRACKWAY_UP_<NAME> sets each from the environment."""

    model_config = SettingsConfigDict(
        env_prefix="TRACKWAY_UP_", extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    config: Path = Field(default_factory=lambda: CPU_CONFIG)
    """Ray Serve config file: one application per service, with its replicas and settings."""
    outputs: Path = Path("outputs")
    """Folder of runs, weights, MLflow's database and logs."""
    model_path: Path = Field(default_factory=lambda: TINY_MODEL)
    """Hugging Face folder of the policy."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the services. 0 takes a free one."""
    dashboard_port: int = Field(default=8265, ge=0, le=65535)
    """Port of Ray Serve's REST API. 0 takes a free one."""
    ray_port: int = Field(default=6379, ge=0, le=65535)
    """Port of Ray's control store. 0 takes a free one."""
    mlflow_port: int = Field(default=5000, ge=0, le=65535)
    """Port of the MLflow server that is started. 0 takes a free one."""
    mlflow_uri: str | None = Field(default_factory=lambda: os.environ.get("MLFLOW_TRACKING_URI") or None)
    """MLflow: a running server, or a local `sqlite:///file.db` or folder, for which a server is started. None is a
    database in the outputs folder. From MLFLOW_TRACKING_URI."""
    tokens_file: Path | None = None
    """Bearer tokens of all services, a JSON file. TRACKWAY_TOKEN must be one of them. None: this machine only."""
    min_memory_gb: float = Field(default=3.0, ge=0)
    """Gigabytes of available memory below which nothing is started."""
    start_timeout_s: float = Field(default=240.0, gt=0)
    """Seconds until all components must have started."""

    @classmethod
    def read(cls, **explicit: Any) -> Self:
        """Settings from the arguments, else from the environment. Raises UserError for an invalid value."""
        try:
            return cls(**explicit)
        except ValidationError as error:
            problems = [
                f"TRACKWAY_UP_{str(detail['loc'][0]).upper()}: {detail['msg']}, got {detail['input']!r}"
                for detail in error.errors()
            ]
            raise UserError("; ".join(problems)) from error

    @property
    def mlflow_database(self) -> Path | None:
        """Database of the MLflow server to start. None when `mlflow_uri` is a running server.

        Raises ValueError when `mlflow_uri` is neither a server's address nor a local database.
        """
        from trackway.tracing.local_mlflow.client import local_database

        if self.mlflow_uri is None:
            return self.outputs.resolve() / "mlflow" / "mlflow.db"
        return local_database(self.mlflow_uri)
