"""Trajectories side by side: facts, turns, calls."""

from tests.traces.example_trace import CALL, ExampleTrace, chat, span
from trackway.traces.compare import NO_TEXT, DiffPiece, compare, diff, milliseconds, pretty, summary
from trackway.traces.tree import SpanEvent


def head(left: ExampleTrace, right: ExampleTrace) -> dict[str, tuple[str, str]]:
    """The facts that differ."""
    return {
        fact.name: (fact.values[0], fact.values[1])
        for fact in compare([left.tree(), right.tree()]).head
        if fact.differs
    }


def test_a_trajectory_beside_itself_differs_in_nothing() -> None:
    found = compare([ExampleTrace().tree(), ExampleTrace().tree()])
    assert [fact.name for fact in found.head if fact.differs] == []
    assert [turn.equal for turn in found.turns] == [True, True]
    assert (found.prompt.equal, found.scoring.equal, summary(found.turns)) == (True, True, "all 2 turns are the same")


def test_the_facts_that_differ_are_marked() -> None:
    later = ExampleTrace(
        step=10, reward=0.0, trace_id="tr-" + "cd" * 16, feedback={"advantage": -0.5, "fate": "dropped_stale"}
    )
    later["c1"].attributes["agentic.weight_version"] = "9"
    assert head(ExampleTrace(), later) == {
        "trace": ("tr-" + "ab" * 16, "tr-" + "cd" * 16),
        "step": ("3", "10"),
        "reward": ("1", "0"),
        "advantage": ("", "-0.5"),
        "fate": ("", "dropped_stale"),
        "weights": ("3", "3,9"),
    }


def test_a_turn_shows_the_diff_of_what_the_model_wrote() -> None:
    [first, second] = compare([ExampleTrace().tree(), ExampleTrace(answer="#### 48").tree()]).turns
    assert (first.equal, second.equal, second.name) == (True, False, "turn 1")
    assert second.text == diff("#### 54", "#### 48")
    assert second.facts == [["weights 3", "46 → 4 tokens", "119 ms"]] * 2


def test_a_call_shows_its_arguments_and_its_result() -> None:
    other_example = ExampleTrace(arguments={"expression": "6*8"}, result="48")
    other_example["x0"].name = "execute_tool python"
    [call] = compare([ExampleTrace().tree(), other_example.tree()]).turns[0].calls
    assert call.name == diff("calculator", "python")
    assert call.arguments == diff("expression: 6*9", "expression: 6*8")
    assert call.observation == diff("54", "48")
    assert call.ms == [1, 1]


def test_a_call_that_only_one_side_made_stands_beside_nothing() -> None:
    other_example = ExampleTrace()
    other_example.drop("x0")
    [call] = compare([ExampleTrace().tree(), other_example.tree()]).turns[0].calls
    assert call.name.sides == [[DiffPiece("calculator", True)], None]
    assert call.ms[1] is None


def test_a_turn_that_only_one_side_took_stands_beside_nothing() -> None:
    longer = ExampleTrace()
    longer.spans.append(span("t2", "r", "turn 2", "agent", 371, 379))
    longer.spans.append(chat("c2", "t2", 372, "one more", 60, 2))
    [*_, last] = compare([ExampleTrace().tree(), longer.tree()]).turns
    assert (last.name, last.facts[0], last.equal) == ("turn 2", None, False)
    assert last.text == diff(None, "one more")


def test_a_failed_call_shows_its_error() -> None:
    failed = ExampleTrace()
    failed["x0"].status, failed["x0"].error, failed["x0"].outputs = "ERROR", "out of memory", None
    [turn, _] = compare([ExampleTrace().tree(), failed.tree()]).turns
    assert turn.calls[0].observation.sides[1] == [DiffPiece("ERROR out of memory", True)]
    assert turn.facts[1] == ["weights 3", "30 → 8 tokens", "245 ms", "execute_tool calculator: out of memory"]


def test_events_of_a_turn_are_facts_of_it() -> None:
    cut = ExampleTrace()
    cut["c0"].events.append(SpanEvent(name="generation_cut", at_ms=50))
    cut.spans.append(chat("c9", "t0", 120, " and on", 38, 3))
    [turn, _] = compare([ExampleTrace().tree(), cut.tree()]).turns
    assert turn.facts[1] == ["weights 3", "30 → 11 tokens", "245 ms", "generation_cut"]
    assert turn.text == diff(CALL, CALL + " and on")


def test_without_token2text_it_is_said_that_there_is_no_text() -> None:
    example = ExampleTrace()
    example["c0"].outputs = None
    assert compare([example.tree(), example.tree()]).turns[0].text == diff(NO_TEXT, NO_TEXT)


def test_an_agent_loop_without_turns_is_compared_by_what_its_root_did() -> None:
    example = ExampleTrace()
    example.drop("t0", "t1", "c0", "c1", "x0")
    example.spans.append(chat("c8", "r", 10, "alone", 30, 8))
    [turn] = compare([example.tree(), example.tree()]).turns
    assert (turn.name, turn.text) == ("0: chat tiny", diff("alone", "alone"))


def test_a_trace_that_lost_its_root_can_still_be_compared() -> None:
    example = ExampleTrace()
    example.drop("r")
    found = compare([ExampleTrace().tree(), example.tree()])
    assert [turn.equal for turn in found.turns] == [True, True]
    assert found.prompt == diff("user: What is 6*9?", "")


def test_more_than_two_stand_beside_the_first() -> None:
    shorter = ExampleTrace(reward=0.0)
    shorter.drop("t1", "c1")
    found = compare([ExampleTrace().tree(), ExampleTrace(answer="#### 48").tree(), shorter.tree()])
    assert {fact.name: fact.values for fact in found.head if fact.differs}["reward"] == ["1", "1", "0"]
    [first, second] = found.turns
    assert (first.equal, second.equal, len(first.calls[0].ms)) == (True, False, 3)
    assert (second.text, second.facts[2]) == (diff("#### 54", "#### 48", None), None)


def test_durations_are_short() -> None:
    assert [milliseconds(seconds) for seconds in (0.3123, 9.994, 457.2, 1257.0, 12_300.0, None)] == [
        "0.31 ms",
        "9.99 ms",
        "457 ms",
        "1.26 s",
        "12.30 s",
        "",
    ]


def test_values_are_shown_as_plainly_as_they_are() -> None:
    assert pretty("#### 7") == "#### 7"
    assert pretty({"a": 1, "b": "x"}) == "a: 1\nb: x"
    assert pretty({"a": [1]}) == '{\n  "a": [\n    1\n  ]\n}'
    assert pretty(None) == ""
