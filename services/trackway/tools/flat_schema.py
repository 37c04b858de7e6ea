"""A quick yes for arguments of the commonest kind of schema: flat, each of one plain type."""

from collections.abc import Mapping
from typing import Self

from pydantic import JsonValue

_TYPES: dict[JsonValue, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_SAYS_NOTHING = {"title", "description", "default", "examples"}


class FlatSchema:
    """What jsonschema would certainly accept; anything else is for jsonschema to decide and to explain."""

    def __init__(self, types: dict[str, tuple[type, ...]], required: frozenset[str]) -> None:
        self._types = types
        self._required = required

    @classmethod
    def of(cls, parameters: Mapping[str, JsonValue]) -> Self | None:
        """The quick check of a closed object's schema; None when it says more than plain types."""
        properties, required = parameters.get("properties", {}), parameters.get("required", [])
        says_more = parameters.keys() - {"type", "properties", "required", "additionalProperties"} - _SAYS_NOTHING
        if says_more or parameters.get("type") != "object" or parameters.get("additionalProperties") is not False:
            return None
        if not isinstance(properties, dict) or not isinstance(required, list):
            return None
        types: dict[str, tuple[type, ...]] = {}
        for name, schema in properties.items():
            plain = isinstance(schema, dict) and not schema.keys() - {"type"} - _SAYS_NOTHING
            kind = schema.get("type") if plain and isinstance(schema, dict) else None
            if not isinstance(kind, str) or kind not in _TYPES:
                return None
            types[name] = _TYPES[kind]
        return cls(types, frozenset(map(str, required)))

    def accepts(self, arguments: Mapping[str, JsonValue]) -> bool:
        """True only for arguments that fit."""
        if not self._required <= arguments.keys():
            return False
        types = self._types
        return all(type(value) in types.get(name, ()) for name, value in arguments.items())
