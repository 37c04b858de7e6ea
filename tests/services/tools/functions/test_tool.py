"""Functions as tools: the schema from signature and docstring, arguments as the types of the signature."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, JsonValue

from tests.services.tools import travel_functions
from trackway.tools import BaseTool, ToolInputError, ToolResult, function_tool
from trackway.tools.functions import FunctionTool
from trackway.tools.loading import load_tools

pytestmark = pytest.mark.anyio

HERE = Path(travel_functions.__file__)


def tools_of_file(path: Path = HERE) -> dict[str, BaseTool]:
    loaded = load_tools([], [], {}, function_tool_path=path)
    return {tool.name: tool for tool in loaded if isinstance(tool, BaseTool)}


async def run(function: Callable[..., object], **arguments: JsonValue) -> ToolResult:
    return await FunctionTool(function_tool(function)).execute("", arguments)


def test_the_schema_keeps_nested_types_literals_defaults_and_descriptions() -> None:
    function = tools_of_file()["plan"].tool_schema.function

    assert function.description == "Plan a journey.\n\nThe longest leg decides."
    assert function.parameters == {
        "type": "object",
        "additionalProperties": False,
        "required": ["legs", "json"],
        "properties": {
            "legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}, "description": "The flights, in order."},
            "json": {
                "type": "object",
                "additionalProperties": {"type": "integer"},
                "description": "Weights\nby name.",
            },
            "pace": {"type": "string", "enum": ["slow", "fast"], "default": "slow", "description": "How to travel."},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        },
        "$defs": {
            "Leg": {
                "type": "object",
                "description": "One flight.",
                "required": ["title", "hours"],
                "properties": {
                    "title": {"type": "string"},
                    "hours": {"type": "number", "exclusiveMinimum": 0},
                    "stops": {"type": "array", "items": {"$ref": "#/$defs/Leg"}, "default": []},
                },
            }
        },
    }


def test_names_come_from_function_or_decorator_and_descriptions_from_each_docstring_style() -> None:
    tools = tools_of_file()

    described = {
        name: (tool.tool_schema.function.description, tool.tool_schema.function.parameters["properties"])
        for name, tool in tools.items()
        if name != "plan"
    }
    assert described == {
        "whereabouts": ("Find a city.", {"city": {"type": "string", "description": "Its name."}}),
        "thread_name": ("Name the thread.", {"city": {"type": "string", "description": "ignored"}}),
    }
    assert all(tool.stateless for tool in tools.values())


async def test_nested_arguments_arrive_as_models_and_defaults_are_the_functions_own() -> None:
    legs: JsonValue = [{"title": "a", "hours": 2}, {"title": "b", "hours": 1.5, "stops": [{"title": "c", "hours": 1}]}]
    result = await tools_of_file()["plan"].execute("", {"legs": legs, "json": {"a": 1}})

    assert result.text == '{"hours":3.5,"pace":"slow","limit":null,"weights":{"a":1}}'


async def test_what_only_the_model_can_check_is_the_callers_mistake() -> None:
    with pytest.raises(ToolInputError, match=r"^argument 'legs.0.title': expected a title, got spaces$"):
        await tools_of_file()["plan"].execute("", {"legs": [{"title": " ", "hours": 1}], "json": {}})


async def test_a_plain_function_runs_in_a_thread_and_an_async_one_does_not() -> None:
    tools = tools_of_file()
    plain = await tools["thread_name"].execute("", {"city": "Oslo"})
    spoken = await tools["whereabouts"].execute("", {"city": "Oslo"})

    assert plain.text != threading.current_thread().name
    assert (plain.reward, plain.metrics) == (0.5, {"calls": 1.0})
    assert spoken.text == f"Oslo on {threading.current_thread().name}"
    with pytest.raises(ToolInputError, match="expected a city"):
        await tools["thread_name"].execute("", {"city": "nowhere"})


async def test_as_many_threads_run_as_the_tool_may_have_calls() -> None:
    together = threading.Barrier(50)

    def meet() -> int:
        return together.wait(timeout=10)

    tool = FunctionTool(function_tool(meet))
    places = await asyncio.gather(*(tool.execute("", {}) for _ in range(50)))
    assert sorted(int(place.text) for place in places) == list(range(50))


class Point(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        ("a", ToolResult(text="a")),
        (5, ToolResult(text="5")),
        ([1, {"é": None}], ToolResult(text='[1,{"é":null}]')),
        (Point(x=1), ToolResult(text='{"x":1}')),
        (None, ToolResult(text="null")),
        (ToolResult(text="a", reward=2.0), ToolResult(text="a", reward=2.0)),
        (("a",), ToolResult(text="a")),
        (({"a": 1}, None, None), ToolResult(text='{"a":1}')),
        (("a", 1), ToolResult(text="a", reward=1.0)),
        (("a", 1, {"n": 2, "why": "x"}), ToolResult(text="a", reward=1.0, metrics={"n": 2.0})),
    ],
)
async def test_a_return_value_becomes_a_result(returned: object, result: ToolResult) -> None:
    def give() -> object:
        return returned

    assert await run(give) == result


@pytest.mark.parametrize("returned", [(), ("a", 1, {}, 2), ("a", "1"), ("a", 1, [2])])
async def test_a_tuple_of_another_shape_is_the_functions_mistake(returned: object) -> None:
    def give() -> object:
        return returned

    with pytest.raises(TypeError, match="expected"):
        await run(give)


async def test_a_given_schema_stands_and_arguments_arrive_as_they_came() -> None:
    schema: dict[str, JsonValue] = {"type": "function", "function": {"name": "echo", "parameters": {"type": "object"}}}

    @function_tool(schema=schema)
    def echo(**anything):
        return anything

    tool = FunctionTool(echo)
    assert (tool.name, (await tool.execute("", {"a": [1]})).text) == ("echo", '{"a":[1]}')


def test_a_parameter_that_no_schema_can_be_made_of_is_refused_at_the_definition() -> None:
    def bare(city):
        return city

    def variadic(*cities: str) -> str:
        return ""

    def positional(city: str, /) -> str:
        return city

    def lock(guard: threading.Event) -> str:
        return ""

    with pytest.raises(TypeError, match=r"'bare' \(.*test_tool.py:\d+\): .*annotation for parameter 'city'"):
        function_tool(bare)
    with pytest.raises(TypeError, match=r"can be given by name, got '\*cities: str' \(variadic positional\)"):
        function_tool(variadic)
    with pytest.raises(TypeError, match=r"got 'city: str' \(positional-only\)"):
        function_tool(positional)
    with pytest.raises(TypeError, match=r"'lock' .*: expected parameters of types that JSON can carry"):
        function_tool(lock)


def test_a_file_without_tools_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("def plain(a: int) -> int:\n    return a\n")

    with pytest.raises(ValueError, match=r"expected functions decorated .*empty.py', got none"):
        tools_of_file(empty)
    with pytest.raises(FileNotFoundError, match=r"expected a Python file, got '/nowhere\.py'"):
        tools_of_file(Path("/nowhere.py"))
