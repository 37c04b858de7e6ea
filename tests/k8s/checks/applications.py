"""The Serve applications, built as Serve builds them: imports, arguments, environment, names of their deployments."""

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from functools import cache
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError
from ray.serve import Application
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeApplicationSchema

from tests.k8s.checks.environment import environment
from tests.k8s.checks.model import Fault, title
from tests.k8s.checks.render import Render
from tests.k8s.checks.serve import PATH, Config, configs, first

_NOT_THERE = (ImportError, AttributeError, ValueError)


def faults(render: Render) -> Iterator[Fault]:
    """Failing imports, arguments that a builder does not accept, and settings of unknown deployments."""
    for config in configs(render):
        for application in config.schema.applications:
            yield from _application(render, config, application)


def argument_types(config: Config) -> Iterator[type[BaseModel]]:
    """The argument models of the builders that can be imported."""
    for application in config.schema.applications:
        with contextlib.suppress(*_NOT_THERE):
            kind = _arguments(_imported(application.import_path))
            if kind:
                yield kind


def _application(render: Render, config: Config, application: ServeApplicationSchema) -> Iterator[Fault]:
    where, path = title(config.service), f"{PATH}.applications[{application.name}]"
    try:
        _imported(application.import_path)
    except _NOT_THERE as error:
        remedy = "name a module and what is in it"
        yield Fault(where, f"{path}.import_path", "something to import", str(error), remedy)
        return
    said = json.dumps(application.args, sort_keys=True, default=str)
    for pod in [pod for pod in render.pods if pod.owner == where and pod.ray]:  # Serve may build it in any pod
        known = environment(render, pod.ray) if pod.ray else {}
        built = _built(application.import_path, application.name, said, tuple(sorted(known.items())))
        if isinstance(built, str):
            expected = f"arguments and an environment that {application.import_path} takes"
            remedy = "see the service's settings.py"
            yield Fault(where, f"{path}.args", expected, f"{built} (in the pods of {pod.group})", remedy)
            return
        for name in sorted({deployment.name for deployment in application.deployments} - built):
            expected = f"a deployment of the application ({', '.join(sorted(built))})"
            yield Fault(where, f"{path}.deployments[{name}]", expected, name, "name one of those")


@cache
def _built(import_path: str, name: str, args: str, known: tuple[tuple[str, str], ...]) -> set[str] | str:
    """Build an application in a pod's environment, without starting it: the names of its deployments, or the error."""
    try:
        with _as_in(dict(known)):
            builder = _imported(import_path)
            kind = _arguments(builder)
            application = builder(kind.model_validate(json.loads(args))) if kind else builder
            built = build_app(application, name=name, make_deployment_handle=_no_handle)
    except (ValidationError, TypeError, ValueError) as error:
        return first(error)
    return {deployment.name for deployment in built.deployments}


def _no_handle(*_: object) -> Any:
    return None


def _arguments(builder: Any) -> type[BaseModel] | None:
    """The argument model of a builder; None for an application that is already built."""
    if isinstance(builder, Application):
        return None
    [kind] = [hint for name, hint in get_type_hints(builder).items() if name != "return"]
    return kind


def _imported(name: str) -> Any:
    """The object at `pkg.mod:name` or `pkg.mod.name`."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@contextlib.contextmanager
def _as_in(pod: dict[str, str]) -> Iterator[None]:
    """Replace this process's environment by a pod's."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update({"PATH": before.get("PATH", ""), "HOME": before.get("HOME", "/"), **pod})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
