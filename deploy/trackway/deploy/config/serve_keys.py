"""Validation of the keys of a Serve config. Ray Serve ignores unknown keys, so a typo would go unnoticed.

A module of its own, because Ray Serve is not installed where a command only looks at services.
"""

import inspect
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import ServeDeploySchema

UNTYPED = {"autoscaling_config": AutoscalingConfig, "request_router_config": RequestRouterConfig}
"""Parts of a deployment that ServeDeploySchema leaves untyped."""


def unknown_keys(content: object) -> Iterator[tuple[str, set[str]]]:
    """Yields (path, known keys) for each unknown key, at any depth."""
    return _unknown(ServeDeploySchema, content, "")


def _unknown(model: type[BaseModel], content: object, path: str) -> Iterator[tuple[str, set[str]]]:
    if not isinstance(content, dict):
        return
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}
    for key, value in content.items():
        if key not in known:
            yield f"{path}{key}", known
            continue
        below = UNTYPED.get(key) or _model_in(model.model_fields.get(key))
        for at, entry in enumerate(value if isinstance(value, list) else [value]):
            named = f"[{entry.get('name', at)}]" if isinstance(value, list) and isinstance(entry, dict) else ""
            if below:
                yield from _unknown(below, entry, f"{path}{key}{named}.")


def _model_in(field: Any) -> type[BaseModel] | None:
    """The pydantic model among a field's types, if any."""
    kinds = [getattr(field, "annotation", None)]
    while kinds:
        kind = kinds.pop()
        if inspect.isclass(kind) and issubclass(kind, BaseModel):
            return kind
        kinds.extend(get_args(kind))
    return None
