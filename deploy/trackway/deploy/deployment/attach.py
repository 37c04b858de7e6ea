"""Attachment to services that run elsewhere, on Kubernetes or another machine's Ray cluster.

The record of their addresses lets commands treat them like services of `trackway up`. Nothing is started or stopped,
and no secret is stored: each command reads TRACKWAY_TOKEN and Ray's token from its environment.
"""

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import httpx
from pydantic import BaseModel

from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment, summarize_reasons, unanswered
from trackway.deploy.deployment.serve_api import ServeApi, ray_token
from trackway.system.process import UserError
from trackway.wire.service import Health, ServiceName
from trackway.wire.trainer import RunInfo

if TYPE_CHECKING:
    from trackway.trainer.run_state.folder import RunFolder

_POLL_S = 0.5


def attach(
    base_url: str | None,
    service_urls: Sequence[str],
    ray_url: str | None,
    mlflow_uri: str | None,
    outputs: Path,
    wait_s: float,
    report: Report,
) -> Deployment:
    """Write the deployment record after checking that the services, and Ray if its URL is given, can be reached.

    `service_urls` are addresses of services that are not below `base_url`, as `tools=http://127.0.0.1:8001`. Without a
    `base_url` the others come from the variables that services read, such as TRACKWAY_TOOLS_URL.

    Raises:
        UserError: an address cannot be reached, or local services are running for the outputs folder.
        TrackwayError: a service refuses the token.
    """
    variables = {name: os.environ.get(f"TRACKWAY_{name.upper()}_URL") for name in get_args(ServiceName)}
    found = [f"{name}={url}" for name, url in variables.items() if url and base_url is None]
    own = dict(map(_service_url, [*found, *service_urls]))
    missing = [name for name in get_args(ServiceName) if name not in own]
    if base_url is None and missing:
        example = f"--service-url {missing[0]}=http://127.0.0.1:8001"
        raise UserError(f"expected --base-url, or an address of {', '.join(missing)}, got none; give {example}")
    deployment = Deployment(
        base_url="" if base_url is None else address("--base-url", base_url),
        service_urls=own,
        dashboard_url="" if ray_url is None else address("--ray-url", ray_url),
        mlflow_uri=_without_user("--mlflow-uri", mlflow_uri or ""),
        outputs=outputs.resolve(),
        attached=True,
    )
    _check_folder(outputs)
    wait_for(deployment, wait_s, report)
    if deployment.dashboard_url:
        _check_ray(deployment)
        report("ray", "ready")
    deployment.save()
    return deployment


def wait_for(
    deployment: Deployment, wait_s: float, report: Report, path: str = "/health", reply: type[BaseModel] = Health
) -> None:
    """Wait until every service answers `path`.

    Raises:
        UserError: some services, named in the message, did not answer within `wait_s` seconds.
        TrackwayError: a service refuses the token.
    """
    os.environ.setdefault("NO_PROXY", "127.0.0.1,localhost")
    deadline = time.monotonic() + wait_s
    for service in deployment.services:
        report(service, "connecting")
    while late := unanswered(deployment, path, reply):
        _report_all_but(late, deployment, report)
        if time.monotonic() >= deadline:
            within = f" within {wait_s:.0f} s" if wait_s else ""
            raise UserError(
                f"expected every service at {deployment.address} to answer {path}, got no answer{within} from "
                f"{summarize_reasons(late)}; check the services, fix their addresses, or raise --wait"
            )
        time.sleep(_POLL_S)
    _report_all_but({}, deployment, report)


def folder_here(info: RunInfo) -> "RunFolder | None":
    """The folder of a run, or None when this machine does not mount the services' volume."""
    from trackway.trainer.run_state.folder import RunFolder

    folder = RunFolder(Path(info.folder))
    try:
        return folder if folder.exists and folder.info().uid == info.uid else None
    except OSError:
        return None


def _report_all_but(late: dict[str, str], deployment: Deployment, report: Report) -> None:
    for service in deployment.services:
        if service not in late:
            report(service, "ready")


def _service_url(given: str) -> tuple[str, str]:
    name, _, url = given.partition("=")
    if name not in get_args(ServiceName):
        names = ", ".join(get_args(ServiceName))
        raise UserError(f"--service-url: expected SERVICE=ADDRESS with one of {names}, got {given!r}")
    return name, address("--service-url", url)


def address(option: str, url: str) -> str:
    """The address without a trailing slash. Raises UserError unless it is one of HTTP without a password."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{option}: expected an address like http://127.0.0.1:8000, got {url!r} ({error})") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise UserError(f"{option}: expected an address like http://127.0.0.1:8000, got {url!r}")
    return _without_user(option, url.rstrip("/"))


def _without_user(option: str, url: str) -> str:
    if re.search("://[^/]*@", url):
        raise UserError(
            f"{option}: expected no user or password in the address, got some; set them in the environment "
            "(TRACKWAY_TOKEN, RAY_AUTH_TOKEN, MLFLOW_TRACKING_USERNAME and _PASSWORD)"
        )
    return url


def _check_folder(outputs: Path) -> None:
    deployment = Deployment.load(outputs.resolve())
    if deployment and deployment.started_here:
        raise UserError(
            f"services of {outputs} are running on this machine, at {deployment.address}; give another --outputs, or "
            "stop them with `trackway down`"
        )


def _check_ray(deployment: Deployment) -> None:
    there = ServeApi(deployment.dashboard_url, ray_token()).applications()
    missing = [service for service in deployment.services if service not in there]
    if missing:
        raise UserError(
            f"--ray-url: expected the Ray cluster of {deployment.address}, with the applications "
            f"{', '.join(deployment.services)}, got {deployment.dashboard_url} without {', '.join(missing)}; "
            "correct --ray-url"
        )
