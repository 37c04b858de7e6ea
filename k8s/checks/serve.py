"""`serveConfigV2`: text to the API server, read here as Ray Serve reads it, and strictly."""

import inspect
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple, get_args

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from checks.model import Fault, Object, parsed, part, title
from checks.render import Render

PATH = "spec.serveConfigV2"
_UNTYPED = {"autoscaling_config": AutoscalingConfig, "request_router_config": RequestRouterConfig}
"""Parts of a deployment that ServeDeploySchema takes as any dict."""


class Config(NamedTuple):
    """What one RayService deploys."""

    service: Object
    schema: ServeDeploySchema

    def deployments(self) -> Iterator[tuple[ServeApplicationSchema, DeploymentSchema]]:
        """Each deployment, with its application."""
        for application in self.schema.applications:
            yield from ((application, deployment) for deployment in application.deployments)


@lru_cache(maxsize=1)
def configs(render: Render) -> list[Config]:
    """The Serve configs that Ray takes."""
    read = [(service, _read(part(service, PATH))) for service in render.of("RayService")]
    return [Config(service, schema) for service, (_, schema) in read if isinstance(schema, ServeDeploySchema)]


def faults(render: Render) -> Iterator[Fault]:
    """Keys that Serve would ignore, and values that it refuses."""
    for service in render.of("RayService"):
        content, schema = _read(part(service, PATH))
        if isinstance(schema, str):
            yield Fault(title(service), PATH, "a Ray Serve config", schema, "mend the Serve config")
            continue
        for application in schema.applications:
            for deployment in application.deployments:
                path = f"{PATH}.applications[{application.name}].deployments[{deployment.name}]"
                for name, wrong in _refused(deployment):
                    expected = _UNTYPED[name].__name__
                    yield Fault(title(service), f"{path}.{name}", expected, wrong, "mend the Serve config")
        for path, known in _unknown(ServeDeploySchema, content, PATH):
            expected, remedy = f"one of {', '.join(sorted(known))}", "Serve ignores what it does not know"
            yield Fault(title(service), path, expected, path.rpartition(".")[2], remedy)


def first(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, ValidationError):
        [one, *_] = error.errors()
        return f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
    return " ".join(str(error).split())


@cache
def _read(text: str | None) -> tuple[Any, ServeDeploySchema | str]:
    """(content, what Ray makes of it or why it does not take it)."""
    try:
        content = parsed(text or "")
        return content, ServeDeploySchema.model_validate(content)
    except (ValidationError, yaml.YAMLError, ImportError, AttributeError) as error:  # it imports policies and routers
        return None, first(error)


def _refused(deployment: DeploymentSchema) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of the parts that ServeDeploySchema lets pass."""
    for name, kind in _UNTYPED.items():
        given = getattr(deployment, name)
        try:
            if isinstance(given, dict):
                kind.model_validate(given)
        except ValidationError as error:
            yield name, first(error)


def _unknown(model: type[BaseModel], content: object, path: str) -> Iterator[tuple[str, set[str]]]:
    """(path, known keys) of each key that the model does not have, at any depth."""
    if not isinstance(content, dict):
        return
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}
    for key, value in content.items():
        if key not in known:
            yield f"{path}.{key}", known
            continue
        below = _UNTYPED.get(key) or _model_in(model.model_fields.get(key))
        for at, entry in enumerate(value if isinstance(value, list) else [value]):
            named = f"[{entry.get('name', at)}]" if isinstance(value, list) and isinstance(entry, dict) else ""
            if below:
                yield from _unknown(below, entry, f"{path}.{key}{named}")


def _model_in(field: Any) -> type[BaseModel] | None:
    """The model among a field's types."""
    kinds = [getattr(field, "annotation", None)]
    while kinds:
        kind = kinds.pop()
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
        kinds.extend(get_args(kind))
    return None
