"""The page of the wire models: what crosses a process, field by field."""

import importlib
import inspect
import json
import pkgutil
from functools import cache
from types import ModuleType

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

import trackway.wire as wire
from generators.docstrings import field_docstrings
from generators.json_schema import type_of
from generators.markdown import code, page, sentence, table
from trackway.wire.base import WireReply, WireRequest
from trackway.wire.errors import ErrorCode


def wire_page() -> str:
    """Every model of every wire module with its fields: type, default and meaning."""
    parts = [
        f"## {module.__name__.removeprefix('trackway.wire.')}\n\n{_described(module)}"
        for module in _modules()
        if _models(module)
    ]
    return page(
        "Wire models",
        "The bodies of requests and replies. A request with an unknown field is refused; unknown fields of a reply are "
        "ignored, so that a service may be newer than its client.",
        *parts,
    )


def link(name: str, page: str = "") -> str:
    """A link to a model, from the page itself or from another one of the Reference; else its name as code."""
    if name == ErrorCode.__name__:
        return f"[{name}](errors.md)"
    return f"[{name}]({page}#{name.lower()})" if name in _by_name() else code(name)


@cache
def _by_name() -> dict[str, type[BaseModel]]:
    return {cls.__name__: cls for module in _modules() for cls in _models(module)}


@cache
def _modules() -> list[ModuleType]:
    names = sorted(found.name for found in pkgutil.walk_packages(wire.__path__, "trackway.wire."))
    return [importlib.import_module(name) for name in names]


def _models(module: ModuleType) -> list[type[BaseModel]]:
    """The models that the module defines, in the order of its text."""
    return [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, BaseModel)
        and cls.__module__ == module.__name__
        and not cls.__name__.startswith("_")
        and cls not in (WireRequest, WireReply)
    ]


def _described(module: ModuleType) -> str:
    models = (
        f"### {cls.__name__}\n\n{sentence(inspect.getdoc(cls) or '')}\n\n{fields(cls)}" for cls in _models(module)
    )
    summary = (inspect.getdoc(module) or "").partition("\n\n")[0]
    return "\n\n".join([summary, *models])


def fields(cls: type[BaseModel]) -> str:
    """A table of a model's fields; empty for a model without fields."""
    schema = cls.model_json_schema()
    definitions = schema.get("$defs", {})
    properties = (definitions.get(cls.__name__) or schema).get("properties", {})
    sentences = field_docstrings(cls)
    rows = [
        (
            code(field.alias or name),
            type_of(properties[field.alias or name], definitions, link),
            _default(field),
            sentences.get(name, ""),
        )
        for name, field in cls.model_fields.items()
    ]
    header = ("Field", "Type", "Default", "Meaning")
    if not any(meaning for *_, meaning in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return table(header, rows) if rows else ""


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its defaults"
    return "required" if value is PydanticUndefined else code(json.dumps(to_jsonable_python(value)))
