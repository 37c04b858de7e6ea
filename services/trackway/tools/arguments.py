"""Check a call's arguments against the tool's JSON schema, and say what is wrong in words that a model can act on."""

from collections.abc import Iterator
from itertools import islice

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from pydantic import JsonValue

from trackway.tools.base import ToolInputError
from trackway.tools.flat_schema import FlatSchema
from trackway.wire.chat import ToolSchema

MAX_MESSAGE_CHARS = 1000
"""A wrong value may be long, and the message becomes an observation."""

MAX_PROBLEMS = 10
"""Wrong arguments that are named."""

_COMPOSING = {"allOf", "anyOf", "oneOf", "if", "$ref"}


class ArgumentCheck:
    """The compiled parameter schema of one tool; unknown arguments are refused unless the schema allows them.

    ValueError when the schema itself is not a valid JSON schema.
    """

    def __init__(self, schema: ToolSchema) -> None:
        function = schema.function
        self._tool = function.name
        self._known = sorted(properties_of(function.parameters))
        # In a composed schema the names stand in its parts, which only "unevaluated" looks into.
        closed = "unevaluatedProperties" if _COMPOSING & set(function.parameters) else "additionalProperties"
        parameters = {"type": "object", closed: False, **function.parameters}
        if elsewhere := [ref for ref in _references(parameters) if not ref.startswith("#")]:
            raise ValueError(f"tool {self._tool!r}: expected $ref within the schema, got {elsewhere[0]!r}; copy it in")
        try:
            Draft202012Validator.check_schema(parameters)
        except SchemaError as error:
            raise ValueError(f"tool {self._tool!r}: expected a JSON schema, got: {error.message}") from error
        self._validator = Draft202012Validator(parameters)
        self._flat = FlatSchema.of(parameters)

    def __call__(self, arguments: dict[str, JsonValue]) -> None:
        """Pass, or raise ToolInputError that names every wrong argument."""
        if self._flat is not None and self._flat.accepts(arguments):
            return
        try:
            errors = islice(self._validator.iter_errors(arguments), MAX_PROBLEMS)
            problems = [text for error in errors for text in self._texts(error)]
        except RecursionError:
            problems = ["the arguments nest too deeply"]
        if problems:
            message = f"{self._tool}: {'; '.join(problems)}; expected arguments: {', '.join(self._known)}"
            raise ToolInputError(message[:MAX_MESSAGE_CHARS], tool=self._tool)

    def _texts(self, error: ValidationError) -> Iterator[str]:
        if error.path:
            yield f"argument '{'.'.join(str(part) for part in error.path)}': {error.message}"
        elif error.validator == "required" and isinstance(error.instance, dict):
            # jsonschema reports each missing name on its own and quotes it in the message.
            yield f"missing argument: {error.message}"
        elif error.validator == "additionalProperties" and isinstance(error.instance, dict):
            unknown = sorted(set(error.instance) - set(self._known))
            yield f"unknown argument: {', '.join(repr(name) for name in unknown)}"
        else:
            yield error.message


def properties_of(parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The parameters that a schema names."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _references(schema: JsonValue) -> Iterator[str]:
    """Every `$ref` in it; one that leads elsewhere would be fetched."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)
