"""Spans in any order become one tree."""

import pytest
from pydantic import JsonValue

from tests.traces.example_trace import ExampleTrace, framework
from tests.traces.framework_spans import GEN_AI, GEN_AI_TOOL, OPENINFERENCE
from trackway.traces.tree import assemble, hex_id, kind_of


def test_spans_in_any_order_become_the_same_tree_with_children_by_start() -> None:
    example = ExampleTrace()
    straight = example.tree()
    example.spans.reverse()
    assert example.tree() == straight
    root = straight.root
    assert [span.name for span in root.walk()] == [
        "trajectory",
        "turn 0",
        "chat tiny",
        "execute_tool calculator",
        "turn 1",
        "chat tiny",
        "reward",
    ]
    assert (straight.orphans, root.duration_ms) == ([], 400)


def test_a_span_whose_parent_is_absent_stands_behind_the_root_even_when_it_began_earlier() -> None:
    example = ExampleTrace()
    example.drop("t0")
    example["x0"].start_ms = -1.0  # clocks of two machines
    tree = example.tree()
    assert [span.span_id for span in tree.roots] == ["r", "x0", "c0"]
    assert ([span.span_id for span in tree.orphans], tree.root.span_id) == (["x0", "c0"], "r")
    assert [span.span_id for span in tree.spans()] == ["r", "t1", "c1", "s", "x0", "c0"]


def test_spans_of_a_kind_come_by_start_wherever_they_hang() -> None:
    example = ExampleTrace()
    example["c0"].start_ms = 300
    assert [span.span_id for span in example.tree().of_kind("chat")] == ["c1", "c0"]


@pytest.mark.parametrize(
    ("attributes", "start_ms", "end_ms", "others"),
    [
        (OPENINFERENCE, 6, 240, []),
        (OPENINFERENCE, 6, None, []),
        (OPENINFERENCE, 300, 350, ["f"]),  # after the call with as many tokens
        (OPENINFERENCE | {"llm.token_count.prompt": 31}, 6, 240, ["f"]),
        (GEN_AI, 255, 365, []),
        (GEN_AI_TOOL, 149, 152, []),
        (GEN_AI_TOOL | {"gen_ai.tool.name": "search"}, 149, 152, ["f"]),
    ],
)
def test_a_frameworks_record_of_our_call_is_no_other_call(
    attributes: dict[str, JsonValue], start_ms: float, end_ms: float | None, others: list[str]
) -> None:
    example = ExampleTrace()
    span = framework("f", attributes, start_ms, end_ms)
    example.spans.append(span)
    assert [span.span_id for span in example.tree().of_frameworks(span.kind)] == others
    assert [span.span_id for span in example.tree().of_kind("chat")] == ["c0", "c1"]


def test_a_framework_that_sends_its_context_has_our_call_below_its_own() -> None:
    example = ExampleTrace()
    example.spans.append(framework("f", {"openinference.span.kind": "LLM"}, 4, 251))
    example["t0"].parent_id = "f"
    assert example.tree().of_frameworks("chat") == []


def test_no_span_is_no_tree() -> None:
    assert assemble([]) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("trajectory", "trajectory"),
        ("turn 12", "turn"),
        ("chat my model", "chat"),
        ("execute_tool calculator", "execute_tool"),
        ("train step 3", "train"),
        ("optimizer_step 0", "optimizer_step"),
        ("MyLoop.turn", "operation"),
        ("chatty", "operation"),
    ],
)
def test_a_spans_name_says_its_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_an_id_is_the_same_with_and_without_mlflows_prefix() -> None:
    assert hex_id("tr-" + "ab" * 16) == hex_id("ab" * 16) == "ab" * 16
