"""Settings of the services in the pods' environment."""

import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_settings import BaseSettings

from tests.k8s.checks.applications import argument_types
from tests.k8s.checks.environment import environment
from tests.k8s.checks.model import Fault, title
from tests.k8s.checks.render import Render
from tests.k8s.checks.serve import configs

_PREFIX = "TRACKWAY_"


def faults(render: Render) -> Iterator[Fault]:
    """Variables that are not a setting of any service, and settings that differ between Ray pods.

    Serve reads the settings where it builds an application, which may be any pod.
    """
    for config in configs(render):
        kinds = [kind for kind in argument_types(config) if issubclass(kind, BaseSettings)]
        pods = [(pod, pod.ray) for pod in render.pods if pod.owner == title(config.service)]
        known = [(pod, ray, _ours(environment(render, ray))) for pod, ray in pods if ray]
        [(first, _, firsts), *_] = known
        for pod, ray, variables in known:
            for name in variables:
                if not any(_has(kind, name.removeprefix(_PREFIX).lower().split("__")) for kind in kinds):
                    expected = f"{_PREFIX}<NAME>[__<NAME>] of a setting of some service"
                    yield Fault(pod.owner, f"{ray.path}.env[{name}]", expected, name, "see the services' settings.py")
            for name in sorted(firsts.keys() | variables.keys()):
                if firsts.get(name) != variables.get(name):
                    expected = f"what the pods of {first.group} have ({firsts.get(name)})"
                    remedy = "give all Ray pods the same, or say it in the application's args"
                    yield Fault(pod.owner, f"{ray.path}.env[{name}]", expected, str(variables.get(name)), remedy)


def _ours(known: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in known.items() if name.startswith(_PREFIX)}


def _has(kind: object, names: list[str]) -> bool:
    """Whether a settings model has a setting at this path; anything is allowed below a dict or a list."""
    if not names:
        return True
    models = [
        candidate
        for candidate in (kind, *typing.get_args(kind))
        if isinstance(candidate, type) and issubclass(candidate, BaseModel)
    ]
    if not models:
        return typing.get_origin(kind) is not None
    fields = models[0].model_fields
    return names[0] in fields and _has(fields[names[0]].annotation, names[1:])
