"""The record of a deployment: its addresses, its services, and the processes started on this machine.

`find_running` returns the deployment of an outputs folder: local processes, or attached services that answer.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, Field, ValidationError

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.deploy.deployment.processes import ProcessRecord
from trackway.system import atomic_write, writing
from trackway.system.process import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Health, ServiceName


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
    tinker_url: str = ""
    """Address of Tinker's API that goes around Serve's proxy. Empty for attached services."""
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


_ASK = CallPolicy.question(5.0)


class NothingRuns(UserError):
    """The outputs folder has no running deployment."""


def find_running(outputs: Path) -> Deployment | None:
    """Like `load_running`, but returns None when nothing is running."""
    try:
        return load_running(outputs)
    except NothingRuns:
        return None


def recorded(outputs: Path) -> Deployment | None:
    """Return the deployment that an outputs folder is attached to, or that runs on this machine. It may not answer."""
    deployment = Deployment.load(outputs.resolve())
    return deployment if deployment and (deployment.attached or deployment.started_here) else None


def load_running(outputs: Path) -> Deployment:
    """The running deployment of an outputs folder. Attached services count as running if at least one answers.

    Raises:
        NothingRuns: nothing is running; the message has the remedy.
        TrackwayError: attached services refuse the token.
    """
    deployment = recorded(outputs)
    if deployment is None:
        raise NothingRuns(f"no services are running for {outputs}; start them with `trackway up`, or give --outputs")
    os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")
    if deployment.attached:
        late = unanswered(deployment)
        if len(late) == len(deployment.services):
            raise NothingRuns(
                f"{outputs} is attached to services at {deployment.address}, and none answers: "
                f"{summarize_reasons(late)}; check the services and the network, or attach to another address with "
                "`trackway attach`"
            )
    return deployment


def unanswered(deployment: Deployment, path: str = "/health", reply: type[BaseModel] = Health) -> dict[str, str]:
    """The services that do not answer, with the reason. Raises TrackwayError if one refuses the token."""

    async def ask_all() -> list[str]:
        urls = [deployment.url(service) for service in deployment.services]
        return await asyncio.gather(*(_reason(url, path, reply) for url in urls))

    return {name: why for name, why in zip(deployment.services, run(ask_all()), strict=True) if why}


def summarize_reasons(late: Mapping[str, str]) -> str:
    """Names and reasons in one line, each reason once."""
    services: dict[str, list[str]] = defaultdict(list)
    for name, why in late.items():
        services[why].append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in services.items())


async def _reason(url: str, path: str, reply: type[BaseModel]) -> str:
    """The reason why there is no answer. Empty when there is one."""
    try:
        await ServiceClient(url, policy=_ASK).call("GET", path, reply=reply)
    except TrackwayError as error:
        if error.code in (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN):
            raise
        if isinstance(error.__cause__, ValidationError):
            return f"the server at {url} is not a Trackway service"
        return str(error.__cause__ or "").strip() or error.message
    return ""
