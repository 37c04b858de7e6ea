"""Checks a call's arguments against the tool's JSON schema, with error messages that help a model."""

from collections.abc import Iterable, Iterator
from itertools import islice

from jsonschema_rs import Draft202012Validator, FancyRegexOptions, ValidationError
from pydantic import JsonValue

from trackway.tools.base import ToolInputError
from trackway.wire.chat import ToolSchema

MAX_MESSAGE_CHARS = 1000
"""Maximum characters of an error: a wrong value may be long, and the message becomes an observation."""

MAX_PROBLEMS = 10
"""Maximum problems in an error."""

MAX_EXPLAINED_VALUES = 1000
"""Arguments with more values than this get only their first problem reported."""

_COMPOSING = {"allOf", "anyOf", "oneOf", "if", "$ref"}

# A pattern takes linear time, unless it has look-around or a back-reference: it then fails after this many steps.
_PATTERNS = FancyRegexOptions(backtrack_limit=10_000)


class ArgumentCheck:
    """The compiled parameter schema of one tool. Unknown arguments are refused unless the schema allows them.

    The arguments come from a parsed request, which nests at most 255 deep. A recursive schema takes over 10,000.
    ValueError when the schema itself is not a valid JSON schema.
    """

    def __init__(self, schema: ToolSchema) -> None:
        function = schema.function
        self._tool = function.name
        self._known = sorted(properties_of(function.parameters))
        # In a composed schema the names are in its parts, which only "unevaluated" covers.
        closed = "unevaluatedProperties" if _COMPOSING & set(function.parameters) else "additionalProperties"
        parameters = {"type": "object", closed: False, **function.parameters}
        if elsewhere := [ref for ref in _references(parameters) if not ref.startswith("#")]:
            raise ValueError(f"tool {self._tool!r}: expected $ref within the schema, got {elsewhere[0]!r}; copy it in")
        try:
            self._validator = Draft202012Validator(parameters, pattern_options=_PATTERNS, offline=True)
        except ValidationError as error:
            raise ValueError(f"tool {self._tool!r}: expected a JSON schema, got: {error.message}") from error

    def __call__(self, arguments: dict[str, JsonValue]) -> None:
        """Raises ToolInputError that names the wrong arguments."""
        if problems := self._problems(arguments):
            message = f"{self._tool}: {'; '.join(problems)}; expected arguments: {', '.join(self._known)}"
            raise ToolInputError(message[:MAX_MESSAGE_CHARS], tool=self._tool)

    def _problems(self, arguments: dict[str, JsonValue]) -> list[str]:
        try:
            self._validator.validate(arguments)
        except ValidationError as first:
            small = sum(1 for _ in islice(_values(arguments), MAX_EXPLAINED_VALUES)) < MAX_EXPLAINED_VALUES
            errors = self._validator.iter_errors(arguments) if small else [first]
            return [self._text(error, arguments) for error in islice(errors, MAX_PROBLEMS)]
        except UnicodeEncodeError:
            return ["expected whole characters, got half of one (a lone surrogate)"]
        return []

    def _text(self, error: ValidationError, arguments: dict[str, JsonValue]) -> str:
        if error.schema_path == ["additionalProperties"]:
            unknown = sorted(arguments.keys() - set(self._known))
            return f"unknown argument: {', '.join(repr(name) for name in unknown)}"
        if error.instance_path:
            return f"argument '{'.'.join(str(part) for part in error.instance_path)}': {error.message}"
        if error.schema_path[-1] == "required":
            return f"missing argument: {error.message}"
        return error.message


def _values(value: JsonValue) -> Iterator[JsonValue]:
    yield value
    for part in _parts(value):
        yield from _values(part)


def _parts(value: JsonValue) -> Iterable[JsonValue]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def properties_of(parameters: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The parameter names of a schema."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _references(schema: JsonValue) -> Iterator[str]:
    """All `$ref`s of a schema. An external one would be fetched."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)
