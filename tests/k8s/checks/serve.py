"""`serveConfigV2`, which is plain text to the API server, validated strictly with Ray Serve's schema."""

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

from tests.k8s.checks.model import Fault, Object, parsed, part, title
from tests.k8s.checks.render import Render
from trackway.deploy.config.serve_keys import UNTYPED, unknown_keys

PATH = "spec.serveConfigV2"


class Config(NamedTuple):
    """The Serve config of a RayService."""

    service: Object
    schema: ServeDeploySchema

    def deployments(self) -> Iterator[tuple[ServeApplicationSchema, DeploymentSchema]]:
        """Each deployment, with its application."""
        for application in self.schema.applications:
            yield from ((application, deployment) for deployment in application.deployments)


@lru_cache(maxsize=1)
def configs(render: Render) -> list[Config]:
    """The Serve configs that Ray accepts."""
    read = [(service, _read(part(service, PATH))) for service in render.of("RayService")]
    return [Config(service, schema) for service, (_, schema) in read if isinstance(schema, ServeDeploySchema)]


def faults(render: Render) -> Iterator[Fault]:
    """Keys that Serve would ignore, and values that it rejects."""
    for service in render.of("RayService"):
        content, schema = _read(part(service, PATH))
        if isinstance(schema, str):
            yield Fault(title(service), PATH, "a Ray Serve config", schema, "correct the Serve config")
            continue
        for application in schema.applications:
            for deployment in application.deployments:
                path = f"{PATH}.applications[{application.name}].deployments[{deployment.name}]"
                for name, wrong in _refused(deployment):
                    expected = UNTYPED[name].__name__
                    yield Fault(title(service), f"{path}.{name}", expected, wrong, "correct the Serve config")
        for path, known in unknown_keys(content):
            expected, remedy = f"one of {', '.join(sorted(known))}", "Serve ignores what it does not know"
            yield Fault(title(service), f"{PATH}.{path}", expected, path.rpartition(".")[2], remedy)


def first(error: Exception) -> str:
    """An error on one line."""
    if isinstance(error, ValidationError):
        [first, *_] = error.errors()
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())


@cache
def _read(text: str | None) -> tuple[Any, ServeDeploySchema | str]:
    """(content, the parsed config or Ray's error)."""
    try:
        content = parsed(text or "")
        return content, ServeDeploySchema.model_validate(content)
    except (
        ValidationError,
        yaml.YAMLError,
        ImportError,
        AttributeError,
    ) as error:  # validation imports policies and routers
        return None, first(error)


def _refused(deployment: DeploymentSchema) -> Iterator[tuple[str, str]]:
    """(name, error) of the parts that ServeDeploySchema does not validate."""
    for name, kind in UNTYPED.items():
        given = getattr(deployment, name)
        try:
            if isinstance(given, dict):
                kind.model_validate(given)
        except ValidationError as error:
            yield name, first(error)
