"""Check before a run starts that every logger in `trainer.logger` can be used."""

from importlib.util import find_spec

from trackway.trainer.config import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError

PACKAGES = ("mlflow", "tensorboard", "wandb")
"""Loggers that need the package of the same name, installed by the extra of the same name."""


def check_loggers(config: RunConfig, default_mlflow_uri: str | None) -> None:
    """Raise TrackwayError(INVALID_REQUEST) for loggers whose package is missing, and for MLflow without a URI."""
    missing = missing_for_loggers(config, default_mlflow_uri)
    if missing:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(missing), key="trainer.logger")


def missing_for_loggers(config: RunConfig, default_mlflow_uri: str | None) -> list[str]:
    """A message for each package or setting that a named logger lacks in the trainer's environment."""
    names = config.trainer.logger
    missing = [
        f"trainer.logger: expected the package {name} where the trainer runs, found none; "
        f"pip install 'trackway[{name}]', or leave {name} out"
        for name in names
        if name in PACKAGES and not _installed(name)
    ]
    if "mlflow" in names and not (config.trackway.mlflow_uri or default_mlflow_uri):
        missing.append(
            "trainer.logger: expected a tracking URI for mlflow, got none; set trackway.mlflow_uri, or "
            "MLFLOW_TRACKING_URI in the environment of the trainer service and restart it, or leave mlflow out"
        )
    return missing


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return (
        spec is not None and spec.origin is not None
    )  # a plain folder of that name, such as W&B's output folder, has no origin
