"""`serveConfigV2`: text to the API server, read here as Ray Serve reads it, and strictly."""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from checks.model import Fault, Object, parsed, part, title
from checks.render import Render
from trackway.deploy.config.serve_keys import UNTYPED, unknown_keys

PATH = "spec.serveConfigV2"


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
                    expected = UNTYPED[name].__name__
                    yield Fault(title(service), f"{path}.{name}", expected, wrong, "mend the Serve config")
        for path, known in unknown_keys(content):
            expected, remedy = f"one of {', '.join(sorted(known))}", "Serve ignores what it does not know"
            yield Fault(title(service), f"{PATH}.{path}", expected, path.rpartition(".")[2], remedy)


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
    for name, kind in UNTYPED.items():
        given = getattr(deployment, name)
        try:
            if isinstance(given, dict):
                kind.model_validate(given)
        except ValidationError as error:
            yield name, first(error)
