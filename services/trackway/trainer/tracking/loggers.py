"""`trainer.logger` before a run starts: is everything there that it names?"""

from importlib.util import find_spec

from trackway.trainer.config import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError

PACKAGES = ("mlflow", "tensorboard", "wandb")
"""Loggers that need the package of their name, which the extra of their name installs."""


def check_loggers(config: RunConfig, default_mlflow_uri: str | None) -> None:
    """Raises TrackwayError(INVALID_REQUEST) for a named logger whose package is missing, or MLflow without a URI."""
    names = config.trainer.logger
    for name in names:
        if name in PACKAGES and not _installed(name):
            raise _refused(
                f"expected the package {name} where the trainer runs, found none; "
                f"pip install 'trackway[{name}]', or leave {name} out"
            )
    if "mlflow" in names and not (config.trackway.mlflow_uri or default_mlflow_uri):
        raise _refused(
            "expected a tracking URI for mlflow, got none; set trackway.mlflow_uri, or MLFLOW_TRACKING_URI in the "
            "environment of the trainer service and start that again, or leave mlflow out"
        )


def _installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name, as W&B makes one, has no origin


def _refused(reason: str) -> TrackwayError:
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"trainer.logger: {reason}", key="trainer.logger")
