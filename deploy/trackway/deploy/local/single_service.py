"""One service in this process, under uvicorn: for the tool server alone, and for development."""

import difflib
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import uvicorn
from pydantic import BaseModel, ValidationError

from trackway.clients.http_client import TOKEN
from trackway.deploy.config import serve_config
from trackway.deploy.local.settings import UpSettings
from trackway.serving.settings import ServiceName, ServiceSettings
from trackway.system.process import UserError

SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)
_PREFIX = "TRACKWAY_"
_NOT_SETTINGS = (TOKEN, "TRACKWAY_MLFLOW_DATABASE", "TRACKWAY_WORKER_")
"""Variables, and prefixes of variables, of other parts."""


def app_of(service: ServiceName, config: Path | None = None) -> Any:
    """The service's app with the settings of the Serve config's application, else of the environment.

    Raises:
        UserError: a setting is unknown or has a wrong value, or the service cannot be created with them.
    """
    _refuse_unknown_variables()
    arguments = {} if config is None else serve_config.args_of(serve_config.load(config), service)
    create_app = import_module(f"trackway.{service}.app").create_app
    try:
        return create_app(_settings_class(service)(**arguments))
    except ValidationError as error:
        raise UserError(f"{service}: {_problems(error)}") from error
    except (ImportError, ValueError, TypeError, OSError) as error:
        raise UserError(f"{service}: {error}") from error


def run_app(app: Any, host: str, port: int) -> None:
    """Serve the app until SIGINT or SIGTERM. Requests in progress end first."""
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


def _refuse_unknown_variables() -> None:
    known = {name for settings in (*_settings_classes(), UpSettings) for name in _variables(settings)}
    for name in sorted(os.environ):
        is_ours = name.startswith(_PREFIX) and not name.startswith(_NOT_SETTINGS)
        if is_ours and not any(name == variable or name.startswith(f"{variable}__") for variable in known):
            near = difflib.get_close_matches(name, known, 1)
            remedy = (
                f"did you mean {near[0]}?" if near else "remove it; docs/reference/settings.md lists those there are"
            )
            raise UserError(f"expected variables {_PREFIX}... that are settings, got {name}; {remedy}")


def _settings_classes() -> Iterable[type[ServiceSettings]]:
    """The settings of each service that is installed."""
    for service in SERVICES:
        try:
            yield _settings_class(service)
        except ModuleNotFoundError:
            continue


def _settings_class(service: ServiceName) -> type[ServiceSettings]:
    return getattr(import_module(f"trackway.{service}.settings"), f"{service.capitalize()}Settings")


def _variables(settings: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """Return the environment variable of each field. Fields of a nested model have their own."""
    prefix = prefix or str(settings.model_config.get("env_prefix", ""))
    for name, field in settings.model_fields.items():
        variable = f"{prefix}{name}".upper()
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from _variables(nested, f"{variable}__")
        else:
            yield variable


def _problems(error: ValidationError) -> str:
    """Return each problem with its setting and environment variable, in one line."""
    problems = error.errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, problem['loc']))} ({_variable(problem['loc'])}): {problem['msg']}" for problem in problems
    )


def _variable(location: Sequence[int | str]) -> str:
    """Return the variable that sets the field at this location, or the list or dict around it."""
    names = takewhile(lambda part: isinstance(part, str), location)
    return f"{_PREFIX}{'__'.join(map(str, names))}".upper()
