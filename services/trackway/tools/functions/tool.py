"""`@function_tool`: a typed function as a stateless tool.

    @function_tool
    def convert(amount: float, to: Literal["EUR", "USD"]) -> str: ...

The decorator only attaches the schema to the function; the decorated functions of a file or module become tools when
the server loads them. Both forms of verl 0.8 work: `@function_tool` and `@function_tool("name")`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

import anyio
from pydantic import JsonValue

from trackway.serving.own_code import Declared, module_of_file
from trackway.serving.threads import in_thread
from trackway.tools.base import BaseTool, ToolConfig, ToolLimits
from trackway.tools.functions.results import result_of
from trackway.tools.functions.schema import FunctionParameters
from trackway.wire.chat import ToolSchema
from trackway.wire.tools import ToolResult

F = TypeVar("F", bound=Callable[..., object])

_MARK = "__trackway_function_tool__"
_declared = Declared[Callable[..., object]]()


@dataclass(frozen=True)
class _Noted:
    """Attributes that the decorator attaches; `parameters` is None when the author gave the schema."""

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
    """Make a function a tool; its JSON schema comes from its signature and docstring.

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
    """A decorated function; a function that is not async runs in a thread, so that it does not block the server."""

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
    """Whether the value is decorated with `@function_tool`."""
    return isinstance(getattr(value, _MARK, None), _Noted)


def functions_of_modules(modules: Sequence[str]) -> list[Callable[..., object]]:
    """The decorated functions that these imported modules, or modules below them, define."""
    return _declared.within(modules)


def functions_of_file(path: Path) -> list[Callable[..., object]]:
    """The decorated functions of a Python file, in order.

    FileNotFoundError; ValueError when the file has none; OwnCodeError when it cannot be imported.
    """
    module = module_of_file(path, "function_tool_path")
    functions = [value for value in vars(module).values() if is_function_tool(value)]
    if not functions:
        raise ValueError(
            f"function_tool_path: expected functions decorated with trackway.tools.function_tool in {str(path)!r}, "
            "got none; put @function_tool on the functions to offer"
        )
    return functions
