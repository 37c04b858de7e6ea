"""Placement: the replicas of every deployment fit on the pods of the worker groups."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema

from tests.k8s.checks import kuberay
from tests.k8s.checks.model import Fault, Object, title
from tests.k8s.checks.pods import Pod
from tests.k8s.checks.render import Render
from tests.k8s.checks.serve import PATH, Config, configs

_SLACK = 1e-6


@dataclass
class Group:
    """The pods of one worker group."""

    name: str
    path: str
    offers: dict[str, float]
    most: int

    def holds(self, need: dict[str, float]) -> bool:
        """Whether a replica fits on an empty pod of the group."""
        return _fits(need, self.offers)


def faults(render: Render) -> Iterator[Fault]:
    """Replicas that fit on no pod, and more replicas than fit on all pods."""
    for config in configs(render):
        where = title(config.service)
        groups: list[Group] = []
        for group in _groups(config.service):
            if isinstance(group, Fault):
                yield group
            else:
                groups.append(group)
        for path, deployment in _without_a_place(config, groups):
            offered = "; ".join(f"{group.name}: {_said(group.offers)}" for group in groups)
            expected = f"a worker group whose pods offer {_said(needs(deployment))}"
            remedy = "raise the group's resources, or ask for less"
            yield Fault(where, f"{path}.ray_actor_options", expected, offered, remedy)
        for path, most, placed in _too_many(config, groups):
            expected = f"room for its {most} replicas beside all others on the groups' pods at maxReplicas"
            yield Fault(where, path, expected, f"room for {placed}", "raise maxReplicas, or lower max_replicas")


def held(render: Render, pod: Pod) -> list[tuple[ServeApplicationSchema, DeploymentSchema]]:
    """The deployments whose replicas may run on a pod, with their applications."""
    return _held(render).get((pod.owner, pod.group or ""), [])


@lru_cache(maxsize=1)
def _held(render: Render) -> dict[tuple[str, str], list[tuple[ServeApplicationSchema, DeploymentSchema]]]:
    return {
        (title(config.service), group.name): [pair for pair in config.deployments() if group.holds(needs(pair[1]))]
        for config in configs(render)
        for group in _groups(config.service)
        if isinstance(group, Group)
    }


def needs(deployment: DeploymentSchema) -> dict[str, float]:
    """The Ray resources of one replica."""
    options: Any = deployment.ray_actor_options
    asked = options.model_dump() if hasattr(options, "model_dump") else {}
    cpus = asked.get("num_cpus")
    need = {
        "CPU": 1.0 if cpus is None else cpus,
        "GPU": asked.get("num_gpus"),
        "memory": asked.get("memory"),
        **(asked.get("resources") or {}),
    }
    return {name: value for name, value in need.items() if value}


def most_replicas(deployment: DeploymentSchema) -> int:
    """The most replicas of a deployment."""
    scaling = deployment.autoscaling_config
    if isinstance(scaling, dict):
        return AutoscalingConfig.model_validate(scaling).max_replicas
    return deployment.num_replicas if type(deployment.num_replicas) is int else 1


def _groups(service: Object) -> Iterator[Group | Fault]:
    for name, path, spec in kuberay.groups(service):
        if name == kuberay.HEAD:
            continue
        try:
            yield Group(name, path, kuberay.capacity(spec), kuberay.most_nodes(service, spec))
        except ValueError as error:
            expected = "resources that KubeRay and `ray start` can read"
            yield Fault(title(service), path, expected, str(error), "correct resources or rayStartParams")


def _without_a_place(config: Config, groups: list[Group]) -> Iterator[tuple[str, DeploymentSchema]]:
    for application, deployment in config.deployments():
        if not any(group.holds(needs(deployment)) for group in groups):
            yield f"{PATH}.applications[{application.name}].deployments[{deployment.name}]", deployment


def _too_many(config: Config, groups: list[Group]) -> Iterator[tuple[str, int, int]]:
    """(path, replicas, placed replicas) after placing all, the most constrained deployments first."""
    wanted = []
    for application, deployment in config.deployments():
        fitting = [group for group in groups if group.holds(needs(deployment))]
        if fitting:
            path = f"{PATH}.applications[{application.name}].deployments[{deployment.name}]"
            wanted.append((len(fitting), -max(needs(deployment).values()), path, deployment, fitting))
    total = sum(most_replicas(deployment) for *_, deployment, _ in wanted)
    nodes = {group.name: [dict(group.offers) for _ in range(min(group.most, total))] for group in groups}
    for *_, path, deployment, fitting in sorted(wanted, key=lambda entry: entry[:3]):
        most, placed = most_replicas(deployment), 0
        limit = deployment.max_replicas_per_node if type(deployment.max_replicas_per_node) is int else most
        for node in (node for group in fitting for node in nodes[group.name]):
            placed += _place(needs(deployment), node, min(limit, most - placed))
        if placed < most:
            yield path, most, placed


def _place(need: dict[str, float], node: dict[str, float], most: int) -> int:
    """Place up to `count` replicas on a node and return how many fit."""
    placed = 0
    while placed < most and _fits(need, node):
        for name, value in need.items():
            node[name] -= value
        placed += 1
    return placed


def _fits(need: dict[str, float], offers: dict[str, float]) -> bool:
    return all(offers.get(name, 0.0) >= value - _SLACK for name, value in need.items())


def _said(resources: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in resources.items() if value)
