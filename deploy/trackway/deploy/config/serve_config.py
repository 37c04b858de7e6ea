"""The Serve config file: strict loading, completion with the settings of a start, and changes by `scale`.

vLLM and SGLang servers have a Python environment of their own, because their pinned packages conflict with ours.
"""

import copy
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import ValidationError

from trackway.deploy.bundled import CPU_CONFIG
from trackway.system.process import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_POLICIES = {
    # Serve does not count direct calls, which are most calls of these services.
    f"trackway.deploy.graph:{service}": {"policy": {"policy_function": "trackway.deploy.autoscaling:all_requests"}}
    for service in ("rollout", "tools", "reward", "agent")
}


def load(path: Path) -> dict[str, Any]:
    """The parsed Serve config. Raises UserError for a file that is not YAML, and for an unknown key.

    Serve itself would ignore the key.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise UserError(f"{path}: expected YAML, got: {' '.join(str(error).split())}") from error
    if path != CPU_CONFIG:  # our own file, which a test checks: importing Ray takes seconds
        check(path, content)
    return content


def check(path: Path, content: dict[str, Any]) -> None:
    """Raise UserError for an unknown key or an invalid value of a Serve config."""
    from ray.serve.schema import ServeDeploySchema

    from trackway.deploy.config.serve_keys import unknown_keys

    for key, known in unknown_keys(content):
        raise UserError(f"{path}: unknown key {key!r}; expected one of {', '.join(sorted(known))}")
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{path}: expected a Ray Serve config, got an invalid one: {error}") from error


def complete(
    config: dict[str, Any], *, host: str, port: int, common: dict[str, Any], per_service: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The config with host, port and each application's settings.

    Settings in the file take precedence, also inside `tracing` and `auth`.
    """
    completed = copy.deepcopy(config)
    completed["http_options"] = {**completed.get("http_options", {}), "host": host, "port": port}
    for application in completed["applications"]:
        defaults = {**common, **per_service.get(application["name"], {})}
        file_args = application.get("args", {})
        application["args"] = {**defaults, **file_args}
        for nested in {"tracing", "auth"} & defaults.keys():
            application["args"][nested] = {**defaults[nested], **file_args.get(nested, {})}
    return completed


class Replicas(NamedTuple):
    """The number of replicas of a service: fixed, or autoscaled between two bounds."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `2` or `1-4`. Raises UserError for anything else."""
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", text)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise UserError(f"replicas: expected a number of at least 1, or bounds like 1-4, got {text!r}")
        return cls(least, most)

    @property
    def fixed(self) -> bool:
        """Return whether the number is fixed, without autoscaling."""
        return self.least == self.most

    def __str__(self) -> str:
        return f"{self.least}" if self.fixed else f"{self.least}-{self.most}"


def with_replicas(config: dict[str, Any], service: str, replicas: Replicas) -> dict[str, Any]:
    """The config with a new number of replicas for one service. Deploying it restarts no other service.

    For an autoscaled deployment, a fixed number becomes two equal bounds: if its autoscaling_config were removed, Serve
    would treat the deployment as new and replace its replicas. Bounds enable autoscaling and keep its other settings.

    Raises:
        UserError: the config has no such service.
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
    raise UserError(f"expected a service of the deployment ({names}), got {service!r}; choose one of them")


def _only_deployment(application: dict[str, Any]) -> dict[str, Any]:
    deployments = application.get("deployments") or []
    if len(deployments) != 1:
        raise UserError(f"application {application['name']}: expected one deployment, got {len(deployments)}")
    return deployments[0]


Options = Mapping[str, Any]


def with_options(
    config: dict[str, Any], service: str, args: Options, deployment: Options | None = None
) -> dict[str, Any]:
    """The config with these settings and deployment options merged into one service's."""
    deployment = deployment or {}
    changed = copy.deepcopy(config)
    for application in changed["applications"]:
        if application["name"] == service:
            application["args"] = {**application.get("args", {}), **args}
            [target] = application["deployments"]
            actor = {**target.get("ray_actor_options", {}), **deployment.get("ray_actor_options", {})}
            target |= {**deployment, **({"ray_actor_options": actor} if actor else {})}
    return changed


def with_another(
    config: dict[str, Any], service: str, name: str, args: Options, deployment: Options | None = None
) -> dict[str, Any]:
    """The config with one more application of the kind of `service`: its image, and these settings in place of its own.

    It has one replica, and is served below its name.
    """
    changed = copy.deepcopy(config)
    [like] = [application for application in changed["applications"] if application["name"] == service]
    [target] = copy.deepcopy(like["deployments"])
    target.pop("autoscaling_config", None)
    another = {**copy.deepcopy(like), "name": name, "route_prefix": f"/{name}", "args": {}, "deployments": [target]}
    changed["applications"].append(another)
    return with_options(changed, name, args, {"num_replicas": 1, **(deployment or {})})


def on_own_gpus(names: Sequence[str]) -> dict[str, Any]:
    """Actor options of a deployment that has these GPUs of the machine to itself, whatever Ray gives to others."""
    return {"num_gpus": 0, "runtime_env": {"env_vars": {VISIBLE: ",".join(names)}}}


def own_gpus(config: Mapping[str, Any]) -> set[str]:
    """Names of the GPUs that deployments of the config have to themselves."""
    options = [
        deployment.get("ray_actor_options", {})
        for application in config.get("applications", [])
        for deployment in application.get("deployments", [])
    ]
    given = [option.get("runtime_env", {}).get("env_vars", {}).get(VISIBLE, "") for option in options]
    return {name for names in given for name in names.split(",") if name}


def args_of(config: dict[str, Any], service: str) -> dict[str, Any]:
    """The settings of one service. Empty when the config does not have it."""
    return next(
        (
            application.get("args", {})
            for application in config.get("applications", [])
            if application["name"] == service
        ),
        {},
    )


SERVERS = ("vllm", "sglang")
"""Engines that run as a server process of each replica."""

_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_ANSWER_S = 60.0


def runs_already(rollout_args: dict[str, Any]) -> bool:
    """Return whether the rollout service connects to an existing server instead of starting one."""
    return bool(_setting(rollout_args, "engine_url"))


def engine_python(rollout_args: dict[str, Any]) -> str | None:
    """The interpreter for the engine's server, from the Serve config or the environment. None when neither has it."""
    return _setting(rollout_args, "engine_python")


def check_engine_python(rollout_args: dict[str, Any]) -> None:
    """Raise UserError if the rollout service must start a server and no environment with that engine is configured."""
    engine = _setting(rollout_args, "engine")
    if engine not in SERVERS or runs_already(rollout_args):
        return
    remedy = f"install {engine} into a separate environment, and set TRACKWAY_ENGINE_PYTHON to its bin/python"
    python = engine_python(rollout_args)
    if python is None:
        raise UserError(f"rollout engine {engine}: expected an engine_python, got none; {remedy}")
    if not os.access(python, os.X_OK) or os.path.isdir(python):
        raise UserError(f"rollout engine {engine}: expected an interpreter, got engine_python {python}; {remedy}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    asked = subprocess.run([python, "-c", _HAS, engine], env=clean, timeout=_ANSWER_S, capture_output=True, check=False)
    if asked.returncode:
        raise UserError(f"rollout engine {engine}: expected it in the environment of {python}, got none; {remedy}")


def _setting(rollout_args: dict[str, Any], name: str) -> str | None:
    value = rollout_args.get(name) or os.environ.get(f"TRACKWAY_{name.upper()}")
    return str(value) if value else None
