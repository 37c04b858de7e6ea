"""The services' settings that come from the pods' environment."""

import typing
from collections.abc import Iterator

from pydantic import BaseModel
from pydantic_settings import BaseSettings

from checks.applications import argument_types
from checks.environment import environment
from checks.model import Fault, title
from checks.render import Render
from checks.serve import configs

_PREFIX = "TRACKWAY_"


def faults(render: Render) -> Iterator[Fault]:
    """Variables that are no setting of any service, and such that differ between Ray pods.

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
    """Whether a settings model has the setting of that path; whatever is below a dict or a list may be anything."""
    if not names:
        return True
    models = [one for one in (kind, *typing.get_args(kind)) if isinstance(one, type) and issubclass(one, BaseModel)]
    if not models:
        return typing.get_origin(kind) is not None
    fields = models[0].model_fields
    return names[0] in fields and _has(fields[names[0]].annotation, names[1:])
