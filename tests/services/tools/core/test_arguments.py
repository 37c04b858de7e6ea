import pytest
from pydantic import JsonValue

from trackway.tools.base import ToolInputError
from trackway.tools.core.limits import ArgumentCheck
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
        ({}, 'missing argument: "query" is a required property'),
        ({"query": 5}, "argument 'query': 5 is not of type \"string\""),
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
        ToolInputError, match=r'(?=.*missing argument: "query")(?=.*\'top\': "x" is not of type "integer")'
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
    assert refused.value.message.count('is not of type "integer"') == 10


def test_of_many_values_only_the_first_wrong_one_is_named() -> None:
    ids: dict[str, JsonValue] = {"type": "object", "properties": {"ids": {"items": {"type": "string"}}}}
    with pytest.raises(ToolInputError) as refused:
        check_of(ids)({"ids": [*range(2000)]})
    assert refused.value.message == """search: argument 'ids.0': 0 is not of type "string"; expected arguments: ids"""


def test_a_tool_without_arguments_names_the_unknown_ones() -> None:
    with pytest.raises(ToolInputError, match=r"search: unknown argument: 'a', 'b'; expected arguments: $"):
        check_of({"type": "object", "properties": {}})({"b": 1, "a": 2})


def of_values(**schema: JsonValue) -> ArgumentCheck:
    return check_of({"type": "object", "properties": {"values": schema}})


@pytest.mark.parametrize("pattern", ["(a+)+$", "^(a|a)*$", r"^(?=(a|aa)+$)(.)\2*b"])
def test_a_catastrophic_pattern_is_no_match(pattern: str) -> None:
    with pytest.raises(ToolInputError, match="argument 'values': "):
        of_values(type="string", pattern=pattern)({"values": "a" * 40 + "!"})


def test_a_pattern_that_takes_too_many_steps_is_given_up() -> None:
    with pytest.raises(ToolInputError, match="'values': Error executing regex: Max limit for backtracking count exc"):
        of_values(pattern=r"^(a|a)*\1$")({"values": "a" * 40 + "!"})


@pytest.mark.parametrize("pattern", [r"^\d{3}-\w+$", "^(?!-)[a-z-]+$", r"(.)\1", r"\p{Lu}"])
def test_patterns_of_every_kind_are_checked(pattern: str) -> None:
    check = of_values(type="string", pattern=pattern)
    text = {r"^\d{3}-\w+$": "123-x", "^(?!-)[a-z-]+$": "a-b", r"(.)\1": "aa", r"\p{Lu}": "É"}[pattern]
    check({"values": text})
    with pytest.raises(ToolInputError, match="does not match"):
        check({"values": "-"})


def test_half_of_a_character_matches_no_pattern() -> None:
    with pytest.raises(ToolInputError, match="search: expected whole characters, got half of one"):
        of_values(pattern="h")({"values": "half \ud83d"})


def test_unique_items_are_compared_as_json() -> None:
    check = of_values(type="array", uniqueItems=True)
    check({"values": [1, "1", True, [1], {"a": 1}, {"a": 2}]})
    repeated: list[JsonValue] = [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}]]
    for same in repeated:
        with pytest.raises(ToolInputError, match="has non-unique elements"):
            check({"values": same})
    with pytest.raises(ToolInputError, match="argument 'values': "):
        check({"values": [*range(100_000), 0]})
