"""`@function_tool`: a typed function as a stateless tool.

    @function_tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str: ...

The decorator only attaches the schema to the function. The decorated functions of a file or module become tools when
the server loads them. Both forms of verl 0.8 work: `@function_tool` and `@function_tool("name")`.

A function's parameters become a pydantic model, which gives the JSON schema and converts arguments. Descriptions are
the docstring's (Google, NumPy, reST or Epydoc), types and defaults the signature's. Nested models, Literal, Optional,
list and dict are supported.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, get_type_hints, overload, runtime_checkable

import anyio
import docstring_parser
from pydantic import ConfigDict, Field, JsonValue, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticSerializationError, core_schema, to_json

from trackway.serving.user_code import Declared, in_thread, module_of_file
from trackway.tools.base import BaseTool, ToolConfig, ToolInputError, ToolLimits
from trackway.wire.base import well_formed
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

_SURROGATE = "UnicodeEncodeError: 'utf-8' codec can't encode"
"""The start of pydantic's message for a lone surrogate."""


@runtime_checkable
class Response(Protocol):
    """verl's ToolResponse: text, and images or videos, which are replaced by a marker."""

    text: str | None
    image: list[object] | None
    video: list[object] | None


def result_of(returned: object) -> ToolResult:
    """text | JSON | ToolResult | (response[, reward[, metrics]]). A reward or metrics of None counts as missing.

    TypeError for a tuple of another length, or a reward or metrics of another type.
    """
    if isinstance(returned, ToolResult):
        return returned
    if not isinstance(returned, tuple):
        return ToolResult(text=text_of(returned))
    if not 1 <= len(returned) <= 3:
        raise TypeError(f"expected (response[, reward[, metrics]]), got {len(returned)} values: {returned!r}")
    response, reward, metrics = (*returned, None, None)[:3]
    if reward is not None and not isinstance(reward, int | float):
        raise TypeError(f"expected a number as the reward, got {reward!r}; return (response, reward, metrics)")
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"expected a dict as the metrics, got {metrics!r}; return (response, reward, metrics)")
    return ToolResult(text=text_of(response), reward=float(reward or 0.0), metrics=numbers_of(metrics or {}))


def text_of(response: object) -> str:
    """Returns text unchanged and anything else as JSON. Errors of an iterator are raised."""
    if isinstance(response, str):
        return response
    if isinstance(response, ToolResult):
        return response.text
    if isinstance(response, Response):
        markers = ["[image]"] * len(response.image or []) + ["[video]"] * len(response.video or [])
        return "\n".join(([response.text] if response.text else []) + markers)
    if isinstance(response, Iterator):
        response = list(response)
    try:
        return to_json(response).decode()
    except PydanticSerializationError as error:
        if _SURROGATE not in str(error):
            raise
        return to_json(_well_formed(response)).decode()


def _well_formed(value: object) -> object:
    """Removes lone surrogates from dicts, lists and texts. Anything else is unchanged."""
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, Mapping):
        return {_well_formed(key): _well_formed(item) for key, item in value.items()}
    return [_well_formed(item) for item in value] if isinstance(value, list | tuple) else value


def numbers_of(metrics: Mapping[object, object]) -> dict[str, float]:
    """The numeric, finite metrics, which can be summed. verl's tools may also return texts and None."""
    return {
        str(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


Function = Callable[..., object]

_NAMEABLE = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class FunctionParameters:
    """The parameters of a function. TypeError, with the reason, when they have no schema."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._where = where(function)
        self._doc = docstring_parser.parse(inspect.getdoc(function) or "")
        hints = self._hints()
        parameters = [self._checked(parameter, hints) for parameter in inspect.signature(function).parameters.values()]
        # An argument may be named `json` or `copy`: an alias does not shadow the model's attributes.
        self._fields = {f"argument_{index}": parameter.name for index, parameter in enumerate(parameters)}
        definitions = {
            field: (hints[parameter.name], self._field(parameter))
            for field, parameter in zip(self._fields, parameters, strict=True)
        }
        try:
            self._model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **definitions)  # pyright: ignore[reportCallIssue, reportArgumentType]
        except PydanticUserError as error:
            raise self._no_json(error) from error

    def schema(self, name: str) -> ToolSchema:
        """The OpenAI function schema with that name."""
        try:
            parameters = self._model.model_json_schema(schema_generator=_Untitled)
        except PydanticUserError as error:
            raise self._no_json(error) from error
        parts = (self._doc.short_description, self._doc.long_description)
        description = "\n\n".join(part for part in parts if part)
        return ToolSchema(function=FunctionSchema(name=name, description=description, parameters=parameters))

    def convert(self, arguments: dict[str, JsonValue]) -> dict[str, object]:
        """The given arguments, converted to the types of the signature. ToolInputError names each wrong one."""
        try:
            model = self._model.model_validate(arguments)
        except ValidationError as error:
            raise ToolInputError(
                "; ".join(_problem(detail["loc"], detail["msg"]) for detail in error.errors())
            ) from None
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
        texts = (param.description for param in self._doc.params if param.arg_name == parameter.name)
        default = ... if parameter.default is parameter.empty else parameter.default
        return Field(default, alias=parameter.name, description=next(texts, None))


def where(function: Function) -> str:
    """Names a function in an error message."""
    code = inspect.unwrap(function).__code__ if inspect.isfunction(function) else None
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"function tool {getattr(function, '__name__', function)!r}{place}"


def _problem(location: tuple[int | str, ...], message: str) -> str:
    return f"argument '{'.'.join(str(part) for part in location)}': {message.removeprefix('Value error, ')}"


class _Untitled(GenerateJsonSchema):
    """Omits the titles that pydantic derives from names: they cost tokens and add no information."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        json_schema = super().model_schema(schema)
        json_schema.pop("title", None)
        return json_schema


F = TypeVar("F", bound=Callable[..., object])

_MARK = "__trackway_function_tool__"
_declared = Declared[Callable[..., object]]()


@dataclass(frozen=True)
class _Noted:
    """Attributes that the decorator attaches. `parameters` is None when the author gave the schema."""

    schema: ToolSchema
    parameters: FunctionParameters | None


@overload
def function_tool(name: F) -> F: ...
@overload
def function_tool(
    name: str | None = None, *, schema: ToolSchema | dict[str, JsonValue] | None = None
) -> Callable[[F], F]: ...
def function_tool(
    name: F | str | None = None, *, schema: ToolSchema | dict[str, JsonValue] | None = None
) -> F | Callable[[F], F]:
    """Make a function a tool. Its JSON schema comes from its signature and docstring.

    name: what the model calls it, by default the function's name.
    schema: an OpenAI function schema in place of the inferred one; arguments are then passed as parsed from JSON.
    Raises TypeError when a parameter has no annotation, no name (`*args`), or a type that JSON lacks.
    """
    if callable(name):
        return _noted(name, None, schema)
    return lambda function: _noted(function, name, schema)


def _noted(function: F, name: str | None, schema: ToolSchema | dict[str, JsonValue] | None) -> F:
    if schema is None:
        parameters = FunctionParameters(function)
        noted = _Noted(parameters.schema(name or function.__name__), parameters)
    else:
        noted = _Noted(ToolSchema.model_validate(schema), None)
    setattr(function, _MARK, noted)
    _declared.add(function, function)
    return function


class FunctionTool(BaseTool):
    """A decorated function. A function that is not async runs in a thread, so that it does not block the server."""

    stateless = True

    def __init__(self, function: Callable[..., object], config: ToolConfig | None = None) -> None:
        noted: _Noted = getattr(function, _MARK)
        super().__init__(config or {}, noted.schema)
        self._function = function
        self._convert = noted.parameters.convert if noted.parameters else dict[str, object]
        self._threads = anyio.CapacityLimiter(ToolLimits().narrowed(self.config).tool_concurrency)

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Call the function with the converted arguments."""
        named = self._convert(arguments)
        if inspect.iscoroutinefunction(self._function):
            return result_of(await self._function(**named))
        # A generator runs while its result is converted.
        return await in_thread(lambda: result_of(self._function(**named)), self._threads)


def is_function_tool(value: object) -> bool:
    """Return whether the value is decorated with `@function_tool`."""
    return isinstance(getattr(value, _MARK, None), _Noted)


def functions_of_modules(modules: Sequence[str]) -> list[Callable[..., object]]:
    """The decorated functions that these imported modules, or modules below them, define."""
    return _declared.within(modules)


def functions_of_file(path: Path) -> list[Callable[..., object]]:
    """The decorated functions of a Python file, in order.

    FileNotFoundError. ValueError for a file without one; OwnCodeError when it cannot be imported.
    """
    module = module_of_file(path, "function_tool_path")
    functions = [value for value in vars(module).values() if is_function_tool(value)]
    if not functions:
        raise ValueError(
            f"function_tool_path: expected functions decorated with trackway.tools.function_tool in {str(path)!r}, "
            "got none; put @function_tool on the functions to offer"
        )
    return functions
