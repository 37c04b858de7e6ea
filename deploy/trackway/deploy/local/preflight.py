"""Preconditions of a start. Each failure is one line with its remedy."""

import re
import socket
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

import psutil

from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.system.process import UserError

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+).*;.*\bextra == ['\"](?P<extra>[\w-]+)['\"]")
"""`jinja2>=3.1; extra == 'agent'`. The build has replaced extras inside extras by their packages."""


def missing_packages(extra: str) -> list[str]:
    """The packages that `trackway[extra]` names and that are not installed, sorted. Versions are not compared.

    Raises ValueError for an extra that does not exist.
    """
    lines = [match for line in requires("trackway") or [] if (match := _REQUIREMENT.match(line))]
    named = {line["name"] for line in lines if line["extra"] == extra}
    if not named:
        raise ValueError(f"expected an extra of trackway, got {extra!r}")
    return sorted(name for name in named if not _installed(name))


def _installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def check(settings: UpSettings) -> None:
    """Raise UserError with every failed precondition: running services, missing files, low memory, ports in use."""
    missing = missing_for_start(settings)
    if not (settings.model_path / "config.json").exists():
        missing.append(
            f"model not found: {settings.model_path / 'config.json'}; give --model-path a Hugging Face folder"
        )
    if missing:
        raise UserError("; ".join(missing))


def missing_for_start(settings: UpSettings) -> list[str]:
    """The failed preconditions as sentences, except for the model."""
    checks: list[Callable[[], None]] = [
        partial(_check_not_running, settings.outputs),
        partial(_check_exists, settings.config, "Ray Serve config", "give --config"),
        partial(_check_memory, settings.min_memory_gb),
        partial(_check_mlflow, settings),
        *(partial(check_port, option, port) for option, port in ports(settings).items()),
    ]
    missing = []
    for check_one in checks:
        try:
            check_one()
        except UserError as error:
            missing.append(str(error))
    return missing


def ports(settings: UpSettings) -> dict[str, int]:
    """Option -> port that a start uses, without MLflow's when a running server is given."""
    taken = {
        "--port": settings.port,
        "--dashboard-port": settings.dashboard_port,
        "--ray-port": settings.ray_port,
    }
    try:
        starts_mlflow = settings.mlflow_database is not None
    except ValueError:  # reported by _check_mlflow
        starts_mlflow = False
    return {**taken, "--mlflow-port": settings.mlflow_port} if starts_mlflow else taken


def _check_not_running(outputs: Path) -> None:
    deployment = Deployment.load(outputs)
    if deployment and deployment.attached:
        raise UserError(
            f"{outputs} is attached to services at {deployment.address}; detach with `trackway down`, or give another "
            "--outputs"
        )
    if deployment and deployment.started_here:
        living = ", ".join(
            f"{process.name}: process {process.pid}" for process in deployment.processes if process.find()
        )
        raise UserError(
            f"services of {outputs} are already running at {deployment.address}; stop them with `trackway down`, or "
            f"give another --outputs ({living})"
        )


def _check_mlflow(settings: UpSettings) -> None:
    try:
        starts = settings.mlflow_database is not None
    except ValueError as error:
        raise UserError(str(error)) from error
    if starts and missing_packages("mlflow"):
        raise UserError(
            "expected the package mlflow, since this starts its server, found none; pip install 'trackway[mlflow]', or "
            "give --mlflow-uri"
        )


def _check_exists(path: Path, what: str, remedy: str) -> None:
    if not path.exists():
        raise UserError(f"{what} not found: {path}; {remedy}")


def _check_memory(min_gb: float) -> None:
    available = psutil.virtual_memory().available / 1e9
    if available < min_gb:
        raise UserError(
            f"expected at least {min_gb:.1f} GB of free memory, got {available:.1f} GB; close other programs"
        )


def check_port(option: str, port: int) -> None:
    """Raise UserError if the port is in use; 0 always passes."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} is in use; stop the process that listens on it, or choose another with {option} (0: any)"
            ) from error
