"""The running deployment of an outputs folder: local processes, or attached services that can be reached."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.deploy.deployment.record import Deployment
from trackway.system.user_error import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import Health

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
