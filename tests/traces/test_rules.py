"""Which trees are whole, and the reason for each gap."""

import pytest

from tests.traces.example_trace import CALL, ExampleTrace, chat, framework, span
from tests.traces.framework_spans import GEN_AI, GEN_AI_TOOL
from trackway.traces.rules import expected_spans, gaps, shared_processes, tree_gaps
from trackway.traces.tree import SpanEvent
from trackway.wire.errors import ErrorBody, ErrorCode
from trackway.wire.trajectory import StopReason

FAILED = {
    "error": ErrorBody(code=ErrorCode.TOOL_FAILED, message="it broke", retryable=False),
    "stop_reason": StopReason.ERROR,
    "reward": None,
    "turns": [],
}


def found(example: ExampleTrace, **changes: object) -> list[str]:
    return gaps(example.tree(), example.trajectory(**changes))


def test_a_whole_tree_has_no_gap() -> None:
    assert found(ExampleTrace()) == []


def test_an_absent_trace_is_one_gap() -> None:
    assert gaps(None, ExampleTrace().trajectory()) == ["the trace is absent"]


def test_a_lost_root_leaves_spans_without_their_parent_and_says_nothing_about_tags() -> None:
    example = ExampleTrace(state="IN_PROGRESS")
    example.drop("r")
    example.tags = {}
    assert found(example) == [
        "the root is missing",
        "turn 0 has lost its parent",
        "turn 1 has lost its parent",
        "reward has lost its parent",
    ]


def test_a_lost_generation_is_counted_and_its_turn_is_named() -> None:
    example = ExampleTrace()
    example.drop("c1")
    assert found(example) == ["1 of 2 chat spans: none below turn 1"]


def test_a_lost_turn_orphans_what_it_held() -> None:
    example = ExampleTrace()
    example.drop("t0")
    assert found(example) == [
        "chat tiny has lost its parent",
        "execute_tool calculator has lost its parent",
        "1 of 2 turn spans",
    ]


@pytest.mark.parametrize(("lost", "reason"), [("x0", "0 of 1 execute_tool spans"), ("s", "0 of 1 reward spans")])
def test_a_lost_leaf_is_counted(lost: str, reason: str) -> None:
    example = ExampleTrace()
    example.drop(lost)
    assert found(example) == [reason]


def test_calls_that_reached_no_tool_are_not_expected() -> None:
    example = ExampleTrace()
    example.drop("x0")
    turns = [turn.model_copy(update={"calls_executed": 0}) for turn in example.trajectory().turns]
    assert found(example, turns=turns) == []


def test_a_span_too_many_is_a_gap() -> None:
    example = ExampleTrace()
    example.spans.append(chat("c9", "t0", 120, CALL, 30, 8))
    assert found(example) == ["3 chat spans, expected 2"]


@pytest.mark.parametrize("event", ["retried", "weights_behind", "instance_lost", "replica_lost", "generation_cut"])
def test_work_that_was_repeated_may_have_more_spans(event: str) -> None:
    example = ExampleTrace()
    example["t0"].events.append(SpanEvent(name=event, at_ms=100))
    example.spans.append(chat("c9", "t0", 120, CALL, 30, 8))
    example.spans.append(span("x9", "t0", "execute_tool calculator", "tools", 140, 141))
    assert found(example) == []


def test_other_events_allow_no_more_spans() -> None:
    example = ExampleTrace()
    example["t0"].events.append(SpanEvent(name="tool_failed", at_ms=100))
    example.spans.append(chat("c9", "t0", 120, CALL, 30, 8))
    assert found(example) == ["3 chat spans, expected 2"]


def test_spans_that_a_killed_process_took_with_it_stay_a_gap_that_is_explained() -> None:
    example = ExampleTrace()
    example["t0"].events.append(SpanEvent(name="replica_lost", at_ms=100))
    example.drop("c0")
    died = "a process died, and with it the spans it had not exported"
    assert found(example) == [f"1 of 2 chat spans: none below turn 0; {died}"]


def test_a_repeated_turn_stays_a_gap() -> None:
    example = ExampleTrace()
    example["t0"].events.append(SpanEvent(name="retried", at_ms=100))
    example.spans.append(span("t9", "r", "turn 1", "agent", 252, 253))
    assert found(example) == ["3 turn spans, expected 2"]


def test_a_reward_may_be_the_agents_and_so_may_the_calls_of_an_environment() -> None:
    example = ExampleTrace()
    example["s"].service = "agent"
    assert found(example) == []
    example["r"].attributes["gen_ai.agent.name"] = "environment:echo"
    example["x0"].service = "agent"
    assert found(example) == []


def test_a_span_of_the_wrong_service_is_named() -> None:
    example = ExampleTrace()
    example["x0"].service = "agent"
    example["s"].service = "tools"
    assert found(example) == [
        "execute_tool calculator was made by agent, expected tools",
        "reward was made by tools, expected reward",
    ]


def test_spans_of_the_agents_framework_are_neither_missing_nor_too_many() -> None:
    example = ExampleTrace()
    example.spans += [framework("f0", GEN_AI, 5, 110), framework("f1", GEN_AI_TOOL, 150, 151)]
    assert found(example) == []
    example.drop("c0")
    assert found(example) == ["1 of 2 chat spans: none below turn 0"]


def test_a_traced_function_of_a_users_own_loop_is_no_gap() -> None:
    example = ExampleTrace()
    example.spans.append(span("u", "t0", "MyLoop.think", "agent", 6, 9))
    assert found(example) == []


@pytest.mark.parametrize(
    ("tag", "value", "reason"),
    [
        ("step", "4", "tag step is '4', expected '3'"),
        ("sample_index", "7", "tag sample_index is '7', expected '17'"),
        ("rollout_n", "02", "tag rollout_n is '02', expected '2'"),
        ("validate", "false", "tag validate is 'false', expected 'False'"),
        ("experiment_name", "other", "tag experiment_name is 'other', expected 'tiny'"),
    ],
)
def test_a_tag_that_differs_from_the_trajectorys_is_a_gap(tag: str, value: str, reason: str) -> None:
    example = ExampleTrace()
    example.tags[tag] = value
    assert found(example) == [reason]


def test_a_missing_tag_is_a_gap() -> None:
    example = ExampleTrace()
    del example.tags["rollout_n"]
    assert found(example) == ["tag rollout_n is None, expected '2'"]


def test_a_trace_that_never_ended_is_a_gap() -> None:
    example = ExampleTrace(state="IN_PROGRESS")
    example["r"].end_ms = None
    assert found(example) == ["the trace is still IN_PROGRESS"]


def test_two_roots_are_a_gap() -> None:
    example = ExampleTrace()
    example.spans.append(span("r2", None, "trajectory", "agent", 1, 2))
    assert found(example) == ["2 roots: trajectory, trajectory"]


def test_another_number_of_turns_is_a_gap() -> None:
    assert found(ExampleTrace(), num_turns=6) == ["num_turns is 4 in the trace, 6 in the dump"]


def test_another_reward_is_a_gap_wherever_it_stands() -> None:
    example = ExampleTrace(feedback={"reward": 0.25})
    example["s"].outputs = {"score": 0.5}
    example["r"].outputs = {"reward": 0.75, "num_turns": 4}
    assert found(example) == [
        "the reward is 0.75 in the root, 1 in the dump",
        "the reward is 0.5 in the reward span, 1 in the dump",
        "the reward is 0.25 in the feedback, 1 in the dump",
    ]


def test_a_trace_without_texts_and_feedback_is_whole() -> None:
    example = ExampleTrace()
    for recorded in example.spans:
        recorded.inputs = recorded.outputs = None
    assert found(example) == []


def test_a_failed_trajectory_needs_a_root_with_error_and_no_orphan_only() -> None:
    example = ExampleTrace(state="ERROR")
    example["r"].status = "ERROR"
    example.drop("c0", "x0", "t1", "c1", "s")
    assert found(example, **FAILED) == []
    example.drop("t0")
    example.spans.append(chat("c9", "t0", 120, CALL, 30, 8))
    assert found(example, **FAILED) == ["chat tiny has lost its parent"]


def test_status_and_trajectory_must_agree() -> None:
    example = ExampleTrace()
    assert found(example, **FAILED) == ["the root's status is UNSET, but the trajectory failed with tool_failed"]
    example["r"].status = "ERROR"
    assert found(example) == ["the root's status is ERROR, but the trajectory did not fail"]


def test_an_unscored_trajectory_needs_no_reward_span() -> None:
    example = ExampleTrace()
    example.drop("s")
    assert found(example, reward=None) == []


def test_a_process_that_served_two_services_is_named() -> None:
    example = ExampleTrace()
    assert shared_processes(example.tree()) == []
    example["x0"].attributes["agentic.process"] = 1
    assert shared_processes(example.tree()) == ["process 1 served two services"]


def test_a_tree_can_be_checked_by_its_turns_alone() -> None:
    example = ExampleTrace()
    expected = expected_spans(example.trajectory().turns, rewards=1)
    assert expected == {"turn": 2, "chat": 2, "execute_tool": 1, "reward": 1}
    assert tree_gaps(example.tree(), expected) == []
    example.drop("c0", "c1")
    assert tree_gaps(example.tree(), expected) == ["0 of 2 chat spans: none below turn 0, turn 1"]
