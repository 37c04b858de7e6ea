"""The record of a deployment: its addresses, its services, and the processes started on this machine."""

from pathlib import Path
from typing import get_args

from pydantic import BaseModel, Field

from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system import atomic_write, writing
from trackway.wire.health import ServiceName


class Deployment(BaseModel):
    """A deployment's record: written by `up` or `attach`, read by every other command, removed by `down`."""

    base_url: str
    """The services' address, each below its own prefix. Empty when every service has an address of its own."""
    service_urls: dict[str, str] = Field(default_factory=dict)
    """Addresses of attached services that are not below `base_url`, by name."""
    dashboard_url: str
    """Ray's REST API. Empty for services attached without `--ray-url`."""
    token: str = ""
    """Bearer token of the Ray cluster that `up` started. Only the owner can read the file."""
    mlflow_uri: str
    """Empty for attached services whose MLflow is unknown."""
    outputs: Path
    processes: list[ProcessRecord] = Field(default_factory=list)
    serve_config: dict[str, object] = Field(default_factory=dict)
    attached: bool = False
    """True if the services run elsewhere: nothing was started here, and the record contains no secret."""

    @property
    def services(self) -> list[str]:
        """Names of the deployed services."""
        if self.attached:
            return list(get_args(ServiceName))
        applications = self.serve_config["applications"]
        assert isinstance(applications, list)
        return [application["name"] for application in applications]

    @property
    def address(self) -> str:
        """Addresses of the services, in one line."""
        own = [f"{name} {url}" for name, url in self.service_urls.items()]
        return ", ".join([*([self.base_url] if self.base_url else []), *own])

    def url(self, service: str) -> str:
        """The address of a service, without a trailing slash."""
        return self.service_urls.get(service) or f"{self.base_url}/{service}"

    @property
    def started_here(self) -> bool:
        """Return whether a process that `up` started is still running."""
        return any(process.find() for process in self.processes)

    @staticmethod
    def path(outputs: Path) -> Path:
        """The path of the record."""
        return outputs / ".deployment" / "deployment.json"

    def save(self) -> None:
        """Write the record with access for its owner only."""
        path = self.path(self.outputs)
        with writing(path, "the record of what runs"):
            path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, self.model_dump_json(indent=2), what="the record of what runs", mode=0o600)

    @classmethod
    def load(cls, outputs: Path) -> "Deployment | None":
        """The record, or None when nothing was started or attached."""
        path = cls.path(outputs)
        return cls.model_validate_json(path.read_text()) if path.exists() else None
