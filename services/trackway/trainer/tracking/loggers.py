"""`trainer.logger` before a run starts: is everything there that it names?"""

from importlib.util import find_spec

from trackway.trainer.config import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError

PACKAGES = ("mlflow", "tensorboard", "wandb")
"""Loggers that need the package of their name, which the extra of their name installs."""


def check_loggers(config: RunConfig, default_mlflow_uri: str | None) -> None:
    """Raises TrackwayError(INVALID_REQUEST) for named loggers whose package is missing, and MLflow without a URI."""
    missing = missing_for_loggers(config, default_mlflow_uri)
    if missing:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, "; ".join(missing), key="trainer.logger")


def missing_for_loggers(config: RunConfig, default_mlflow_uri: str | None) -> list[str]:
    """A sentence for each thing that a named logger needs where the trainer runs and does not find."""
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
            "MLFLOW_TRACKING_URI in the environment of the trainer service and start that again, or leave mlflow out"
        )
    return missing


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, as W&B makes one, has no origin
