"""A JSON schema's type in words, for a cell of a table."""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from generators.markdown import code

Schema = Mapping[str, Any]
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
}

_MAX_VALUES = 12
"""Values of an enumeration that are listed; a longer one is linked by its name."""


def type_of(schema: Schema, definitions: Mapping[str, Schema], link: Callable[[str], str]) -> str:
    """The type with its bounds, such as `list of integer (at most 8)`; `link` gives the text of a model's name."""
    bounds = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    return _kind(schema, definitions, link) + (f" ({', '.join(bounds)})" if bounds else "")


def _kind(schema: Schema, definitions: Mapping[str, Schema], link: Callable[[str], str]) -> str:
    def inner(part: Schema) -> str:
        return type_of(part, definitions, link)

    match schema:
        case {"$ref": reference}:
            name = reference.rpartition("/")[2]
            definition = definitions.get(name, {})
            if not definition:  # pydantic's JsonValue
                return "any JSON"
            is_short = "const" in definition or len(definition.get("enum", [])) in range(1, _MAX_VALUES)
            return inner(definition) if is_short else link(name)
        case {"const": value}:
            return code(json.dumps(value))
        case {"enum": values}:
            return " or ".join(code(json.dumps(value)) for value in values)
        case {"anyOf": parts} | {"oneOf": parts}:
            return " or ".join(dict.fromkeys(map(inner, _nulls_last(parts))))
        case {"type": "array", "items": items}:
            return f"list of {inner(items)}"
        case {"type": "object", "additionalProperties": {**values}} if values:
            return f"object of {inner(values)}"
        case {"type": kind}:
            return str(kind)
    return "any JSON"


def _nulls_last(parts: list[Schema]) -> Iterator[Schema]:
    yield from sorted(parts, key=lambda part: part.get("type") == "null")
