"""A function's parameters as a pydantic model: from it come the JSON schema that the model sees and the conversion.

Descriptions are the docstring's (Google, NumPy, reST or Epydoc), types and defaults the signature's. A nested model,
Literal, Optional, list or dict stays what it is.
"""

import inspect
from collections.abc import Callable
from typing import get_type_hints

import docstring_parser
from pydantic import ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from trackway.tools.base import ToolInputError
from trackway.wire.chat import FunctionSchema, ToolSchema

Function = Callable[..., object]

_NAMEABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionParameters:
    """The parameters of one function. TypeError when a schema cannot be made of them; it says which and why."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._where = where(function)
        self._doc = docstring_parser.parse(inspect.getdoc(function) or "")
        hints = self._hints()
        parameters = [self._checked(one, hints) for one in inspect.signature(function).parameters.values()]
        # An argument may be called `json` or `copy`: as an alias it hides no attribute of the model.
        self._fields = {f"argument_{place}": one.name for place, one in enumerate(parameters)}
        definitions = {
            field: (hints[one.name], self._field(one)) for field, one in zip(self._fields, parameters, strict=True)
        }
        try:
            self._model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **definitions)  # pyright: ignore[reportCallIssue, reportArgumentType]
        except PydanticUserError as error:
            raise self._no_json(error) from error

    def schema(self, name: str) -> ToolSchema:
        """The OpenAI function schema under that name."""
        try:
            parameters = self._model.model_json_schema(schema_generator=_Untitled)
        except PydanticUserError as error:
            raise self._no_json(error) from error
        parts = (self._doc.short_description, self._doc.long_description)
        description = "\n\n".join(part for part in parts if part)
        return ToolSchema(function=FunctionSchema(name=name, description=description, parameters=parameters))

    def convert(self, arguments: dict[str, JsonValue]) -> dict[str, object]:
        """The arguments that were given, as the types of the signature. ToolInputError names each wrong one."""
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise ToolInputError("; ".join(_problem(one["loc"], one["msg"]) for one in error.errors())) from None
        return {name: getattr(model, field) for field, name in self._fields.items() if field in model.model_fields_set}

    def _hints(self) -> dict[str, object]:
        try:
            return get_type_hints(self._function, include_extras=True)
        except NameError as error:
            raise TypeError(f"{self._where}: expected annotations that can be resolved, got {error}") from error

    def _no_json(self, error: PydanticUserError) -> TypeError:
        reason = error.message.splitlines()[0]
        return TypeError(f"{self._where}: expected parameters of types that JSON can carry, got: {reason}")

    def _checked(self, parameter: inspect.Parameter, hints: dict[str, object]) -> inspect.Parameter:
        if parameter.kind not in _NAMEABLE:
            raise TypeError(
                f"{self._where}: expected parameters that can be given by name, got {str(parameter)!r} "
                f"({parameter.kind.description}); name each one"
            )
        if parameter.name not in hints:
            raise TypeError(
                f"{self._where}: expected an annotation for parameter {parameter.name!r}, got none; "
                f"write e.g. `{parameter.name}: str`, the JSON schema is made of it"
            )
        return parameter

    def _field(self, parameter: inspect.Parameter) -> FieldInfo:
        texts = (one.description for one in self._doc.params if one.arg_name == parameter.name)
        default = ... if parameter.default is parameter.empty else parameter.default
        return Field(default, alias=parameter.name, description=next(texts, None))


def where(function: Function) -> str:
    """A function in an error message."""
    code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else None
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"function tool {getattr(function, '__name__', function)!r}{place}"


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"argument '{'.'.join(str(part) for part in location)}': {message.removeprefix('Value error, ')}"


class _Untitled(GenerateJsonSchema):
    """Without the titles that pydantic makes of names: they tell a model nothing and cost tokens."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title", None)
        return made
