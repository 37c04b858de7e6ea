"""The Serve config file: read strictly, completed with what this start decides, changed by `scale`."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import yaml
from pydantic import ValidationError

from trackway.system.user_error import UserError

_POLICIES = {
    # Most of its calls are none that Serve counts.
    "trackway.deploy.graph:tools": {"policy": {"policy_function": "trackway.deploy.autoscaling:all_requests"}}
}


def load(path: Path) -> dict[str, Any]:
    """The file as Ray Serve takes it; Serve itself ignores unknown keys, so they are refused here."""
    from ray.serve.schema import ServeDeploySchema

    from trackway.deploy.config.serve_keys import unknown_keys

    content = yaml.safe_load(path.read_text())
    for key, known in unknown_keys(content):
        raise UserError(f"{path}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path} is no Ray Serve config: {error}") from error
    return content


def complete(
    config: dict[str, Any], *, host: str, port: int, common: dict[str, Any], own: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The config with host, port and each application's settings.

    What the file itself says wins, in `tracing` and `auth` too.
    """
    completed = copy.deepcopy(config)
    completed["http_options"] = {**completed.get("http_options", {}), "host": host, "port": port}
    for application in completed["applications"]:
        defaults = {**common, **own.get(application["name"], {})}
        given = application.get("args", {})
        application["args"] = {**defaults, **given}
        for nested in {"tracing", "auth"} & defaults.keys():
            application["args"][nested] = {**defaults[nested], **given.get(nested, {})}
    return completed


class Replicas(NamedTuple):
    """How many replicas a service has: a fixed number, or as many as its load asks for between two bounds."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """`2`, or `1-4`."""
        found = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise UserError(f"replicas: expected a number of at least 1, or bounds like 1-4, got {text!r}")
        return cls(least, most)

    @property
    def fixed(self) -> bool:
        """Whether load does not change it."""
        return self.least == self.most

    def __str__(self) -> str:
        return f"{self.least}" if self.fixed else f"{self.least}-{self.most}"


def with_replicas(config: dict[str, Any], service: str, replicas: Replicas) -> dict[str, Any]:
    """The config with another number of replicas for one service; nothing else restarts.

    On a deployment that follows its load a number is two equal bounds: without its autoscaling_config Serve would count
    it as new and replace its replicas. Bounds begin autoscaling; other settings of it stay.
    """
    changed = copy.deepcopy(config)
    for application in changed["applications"]:
        if application["name"] == service:
            deployment = _only_deployment(application)
            autoscaling = deployment.get("autoscaling_config")
            if replicas.fixed and autoscaling is None:
                deployment["num_replicas"] = replicas.least
            else:
                deployment.pop("num_replicas", None)
                bounds = {"min_replicas": replicas.least, "max_replicas": replicas.most}
                policy = _POLICIES.get(application["import_path"], {})
                deployment["autoscaling_config"] = {**policy, **(autoscaling or {}), **bounds}
            return changed
    names = ", ".join(application["name"] for application in changed["applications"])
    raise UserError(f"no service {service!r} in the deployment; it has {names}")


def _only_deployment(application: dict[str, Any]) -> dict[str, Any]:
    deployments = application.get("deployments") or []
    if len(deployments) != 1:
        raise UserError(f"application {application['name']}: expected one deployment, got {len(deployments)}")
    return deployments[0]


Options = Mapping[str, Any]


def with_options(
    config: dict[str, Any], service: str, args: Options, deployment: Options | None = None
) -> dict[str, Any]:
    """The config with these settings and deployment options of one service laid over its own."""
    deployment = deployment or {}
    changed = copy.deepcopy(config)
    for application in changed["applications"]:
        if application["name"] == service:
            application["args"] = {**application.get("args", {}), **args}
            [own] = application["deployments"]
            actor = {**own.get("ray_actor_options", {}), **deployment.get("ray_actor_options", {})}
            own |= {**deployment, **({"ray_actor_options": actor} if actor else {})}
    return changed


def args_of(config: dict[str, Any], service: str) -> dict[str, Any]:
    """One service's settings."""
    return next((one.get("args", {}) for one in config["applications"] if one["name"] == service), {})
