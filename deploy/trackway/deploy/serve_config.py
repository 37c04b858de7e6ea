"""The Serve config file: read strictly, completed with what this start decides, changed by `scale`."""

import copy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from trackway.deploy.errors import UserError


def load(path: Path) -> dict[str, Any]:
    """The file as Ray Serve takes it; Serve itself ignores unknown keys at the top, so they are refused here."""
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(path.read_text())
    known = set(ServeDeploySchema.model_fields)
    unknown = sorted(set(content) - known)
    if unknown:
        raise UserError(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path} is no Ray Serve config: {error}") from error
    return content


def complete(
    config: dict[str, Any], *, host: str, port: int, common: dict[str, Any], own: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The config with host, port and each application's settings; what the file itself says wins, in `tracing` too."""
    completed = copy.deepcopy(config)
    completed["http_options"] = {**completed.get("http_options", {}), "host": host, "port": port}
    for application in completed["applications"]:
        defaults = {**common, **own.get(application["name"], {})}
        given = application.get("args", {})
        application["args"] = {**defaults, **given}
        if "tracing" in defaults:
            application["args"]["tracing"] = {**defaults["tracing"], **given.get("tracing", {})}
    return completed


def with_replicas(config: dict[str, Any], service: str, replicas: int) -> dict[str, Any]:
    """The config with another number of replicas for one service; nothing else restarts."""
    changed = copy.deepcopy(config)
    for application in changed["applications"]:
        if application["name"] == service:
            [deployment] = application["deployments"]
            deployment.pop("autoscaling_config", None)
            deployment["num_replicas"] = replicas
            return changed
    names = ", ".join(application["name"] for application in changed["applications"])
    raise UserError(f"no service {service!r} in the deployment; it has {names}")
