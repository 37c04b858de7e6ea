"""What must be true before anything starts; each failure is one line with its remedy."""

import socket
from pathlib import Path

import psutil

from trackway.deploy.errors import UserError
from trackway.deploy.settings import Deployment, UpSettings


def check(settings: UpSettings) -> None:
    """Raise UserError when a start would fail: already running, missing file, little memory, a port taken."""
    _check_not_running(settings.outputs)
    _check_exists(settings.config, "Ray Serve config", "give --config")
    _check_exists(settings.model_path / "config.json", "model", "give --model-path a Hugging Face folder")
    _check_memory(settings.min_memory_gb)
    _check_mlflow(settings)
    for option, port in _ports(settings).items():
        check_port(option, port)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ports(settings: UpSettings) -> dict[str, int]:
    ports = {
        "--port": settings.port,
        "--dashboard-port": settings.dashboard_port,
        "--ray-port": settings.ray_port,
    }
    return {**ports, "--mlflow-port": settings.mlflow_port} if settings.mlflow_database else ports


def _check_not_running(outputs: Path) -> None:
    deployment = Deployment.load(outputs)
    if deployment and deployment.attached:
        raise UserError(
            f"{outputs} is attached to services at {deployment.base_url}; forget them with `trackway down`, or give "
            "another --outputs"
        )
    if deployment and deployment.started_here:
        raise UserError(f"services of {outputs} run already at {deployment.base_url}; stop them with `trackway down`")


def _check_mlflow(settings: UpSettings) -> None:
    try:
        _ = settings.mlflow_database
    except ValueError as error:
        raise UserError(str(error)) from error


def _check_exists(path: Path, what: str, remedy: str) -> None:
    if not path.exists():
        raise UserError(f"{what} not found: {path}; {remedy}")


def _check_memory(min_gb: float) -> None:
    available = psutil.virtual_memory().available / 1e9
    if available < min_gb:
        raise UserError(f"expected at least {min_gb:.1f} GB of free memory, got {available:.1f} GB; close something")


def check_port(option: str, port: int) -> None:
    """Raise UserError when somebody listens on the port already; 0 always passes."""
    if port == 0:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"port {port} is taken; stop what listens there or give {option} another (0: any)"
            ) from error
