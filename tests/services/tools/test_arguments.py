import pytest
from pydantic import JsonValue

from trackway.tools.arguments import ArgumentCheck
from trackway.tools.base import ToolInputError
from trackway.wire.chat import FunctionSchema, ToolSchema


def check_of(parameters: dict[str, JsonValue]) -> ArgumentCheck:
    return ArgumentCheck(ToolSchema(function=FunctionSchema(name="search", parameters=parameters)))


SEARCH: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "top": {"type": "integer", "minimum": 1}},
    "required": ["query"],
}


@pytest.mark.parametrize("arguments", [{"query": "a"}, {"query": "a", "top": 3}])
def test_fitting_arguments_pass(arguments: dict[str, JsonValue]) -> None:
    check_of(SEARCH)(arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "missing argument: 'query' is a required property"),
        ({"query": 5}, "argument 'query': 5 is not of type 'string'"),
        ({"query": "a", "top": 0}, "argument 'top': 0 is less than the minimum of 1"),
        ({"query": "a", "b": 1, "a": 2}, "unknown argument: 'a', 'b'"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, JsonValue], problem: str) -> None:
    with pytest.raises(ToolInputError) as caught:
        check_of(SEARCH)(arguments)

    assert caught.value.message == f"search: {problem}; expected arguments: query, top"


def test_every_wrong_argument_is_named_at_once() -> None:
    with pytest.raises(
        ToolInputError, match=r"(?=.*missing argument: 'query')(?=.*'top': 'x' is not of type 'integer')"
    ):
        check_of(SEARCH)({"top": "x"})


def test_a_schema_may_allow_further_arguments() -> None:
    check_of({**SEARCH, "additionalProperties": True})({"query": "a", "other": 1})


def test_a_long_wrong_value_does_not_flood_the_message() -> None:
    with pytest.raises(ToolInputError) as caught:
        check_of(SEARCH)({"query": ["x" * 5000]})

    assert len(caught.value.message) == 1000


def test_a_broken_schema_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="tool 'search': expected a JSON schema"):
        check_of({"properties": {"query": {"type": "text"}}})


COMPOSED: dict[str, JsonValue] = {
    "type": "object",
    "oneOf": [
        {"properties": {"page": {"type": "integer"}}, "required": ["page"]},
        {"properties": {"title": {"type": "string"}}, "required": ["title"]},
    ],
}


def test_the_arguments_of_a_composed_schema_are_known_by_its_parts() -> None:
    check_of(COMPOSED)({"title": "a"})
    with pytest.raises(ToolInputError, match="'b' was unexpected"):
        check_of(COMPOSED)({"title": "a", "b": 1})


def test_a_schema_that_leads_elsewhere_is_refused_instead_of_fetched() -> None:
    with pytest.raises(ValueError, match=r"expected \$ref within the schema, got 'http://10.0.0.1/schema'"):
        check_of({"properties": {"query": {"items": [{"$ref": "http://10.0.0.1/schema"}]}}})


def test_only_the_first_wrong_arguments_are_named() -> None:
    names: JsonValue = {f"a{number:02}": {"type": "integer"} for number in range(30)}
    with pytest.raises(ToolInputError) as refused:
        check_of({"type": "object", "properties": names})({f"a{number:02}": "x" for number in range(30)})
    assert refused.value.message.count("is not of type 'integer'") == 10


def test_arguments_that_nest_too_deeply_for_a_schema_are_refused() -> None:
    either: JsonValue = {"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#/properties/tree"}]}]}
    tree: JsonValue = {"type": "object", "properties": {"next": either}}
    deep: JsonValue = {}
    for _ in range(195):
        deep = {"next": deep}
    with pytest.raises(ToolInputError, match="the arguments nest too deeply"):
        check_of({"type": "object", "properties": {"tree": tree}})({"tree": deep})
