"""The rows of planted conversations: which ids, which of them trained, with which logprobs and versions."""

from tests.services.agent.sessions.conversations import CALCULATOR, add, result, said, system, user
from trackway.agent.sessions.graph import TokenGraph
from trackway.agent.sessions.loop import training_rows
from trackway.wire.sessions import NodeKind, RootReason
from trackway.wire.trajectory import WeightSpan

TASK = [system("Be brief."), user("9+9?")]
CALL = said("I will use the tool.", '{"expression": "9+9"}')


def shown(graph: TokenGraph) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompt, response and mask of each row."""
    return [(row.prompt_ids, row.response_ids, row.response_mask) for row in training_rows(graph.nodes)]


def test_two_turns_with_a_tool_are_one_row_with_logprobs_and_versions_in_place() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1, 2], CALL, [10, 11], version=3)
    add(graph, [*TASK, CALL, result("18")], [20], said("18"), [12, 13], version=4)

    [row] = training_rows(graph.nodes)

    assert (row.prompt_ids, row.response_ids, row.response_mask) == ([1, 2], [10, 11, 20, 12, 13], [1, 1, 0, 1, 1])
    assert row.response_logprobs == [-0.1, -0.11, 0.0, -0.12, -0.13]
    assert row.weight_versions == [
        WeightSpan(version=3, start=0, end=2),
        WeightSpan(version=4, start=3, end=5),
    ]
    assert [(turn.start, turn.end) for turn in row.turns] == [(0, 2), (3, 5)]


def test_guided_tokens_are_context_of_a_row_and_keep_their_turn() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said('{"plan": 1}'), [10, 11], version=3, guided=True)
    add(graph, [*TASK, said('{"plan": 1}'), user("Go on.")], [20], said("18"), [12], version=4)

    [row] = training_rows(graph.nodes)

    assert (row.response_ids, row.response_mask) == ([10, 11, 20, 12], [0, 0, 0, 1])
    assert row.response_logprobs == [0.0, 0.0, 0.0, -0.12]
    assert row.weight_versions == [WeightSpan(version=4, start=3, end=4)]
    assert [(turn.start, turn.end, turn.node.guided) for turn in row.turns] == [(0, 2, True), (3, 4, False)]


def test_a_session_of_guided_calls_alone_is_a_row_without_a_trained_token() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said("{}"), [10], guided=True)

    assert shown(graph) == [([1], [10], [0])]


def test_parallel_branches_share_their_beginning_and_train_it_once() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], CALL, [10])
    add(graph, [*TASK, CALL, result("18")], [20], said("18"), [11])
    add(graph, [*TASK, CALL, result("19")], [21], said("19"), [12])

    assert shown(graph) == [([1], [10, 20, 11], [1, 0, 1]), ([1], [10, 21, 12], [0, 0, 1])]


def test_choices_of_one_call_are_rows_behind_one_prompt() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said("18"), [10])
    add(graph, TASK, [1], said("eighteen"), [11])

    assert [node.kind for node in graph.nodes] == [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.SAMPLED]
    assert shown(graph) == [([1], [10], [1]), ([1], [11], [1])]


def test_a_sub_agent_with_another_system_prompt_is_a_row_of_its_own_and_the_parent_goes_on() -> None:
    graph = TokenGraph()
    sub = [system("You search."), user("9+9?")]
    add(graph, TASK, [1], CALL, [10])
    add(graph, sub, [2], said("eighteen"), [11])
    add(graph, [*TASK, CALL, result("eighteen")], [20], said("18"), [12])

    assert [node.reason for node in graph.nodes if node.parent is None] == [
        RootReason.FIRST_CALL,
        RootReason.OTHER_SYSTEM_PROMPT,
    ]
    assert shown(graph) == [([2], [11], [1]), ([1], [10, 20, 12], [1, 0, 1])]


def test_compaction_begins_a_root_and_neither_row_trains_a_token_twice() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], CALL, [10])
    add(graph, [*TASK, CALL, result("18")], [20], said("Now 18+1", '{"expression": "18+1"}', "call_1"), [11])
    compacted = [TASK[0], user("So far: 9+9 is 18."), user("Continue.")]
    add(graph, compacted, [3, 4], said("19"), [12])

    assert graph.nodes[-2].reason is RootReason.HISTORY_CHANGED
    assert shown(graph) == [([1], [10, 20, 11], [1, 0, 1]), ([3, 4], [12], [1])]


def test_text_that_the_client_changed_begins_a_root() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said("18"), [10])
    add(graph, [*TASK, said("It is 18."), user("Sure?")], [5], said("Yes"), [11])

    assert graph.nodes[-2].reason is RootReason.ASSISTANT_CHANGED
    assert shown(graph) == [([1], [10], [1]), ([5], [11], [1])]


def test_stripped_reasoning_begins_a_root_with_that_reason() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said("<think>nine and nine</think>\n18"), [10])
    add(graph, [*TASK, said("18"), user("Sure?")], [5], said("Yes"), [11])

    assert graph.nodes[-2].reason is RootReason.REASONING_STRIPPED
    assert shown(graph) == [([1], [10], [1]), ([5], [11], [1])]


def test_other_tools_begin_a_root_with_that_reason() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], CALL, [10], tools=[CALCULATOR])
    add(graph, [*TASK, CALL, result("18")], [2], said("18"), [11])

    assert graph.nodes[-2].reason is RootReason.OTHER_TOOLS
    assert shown(graph) == [([1], [10], [1]), ([2], [11], [1])]


def test_an_abandoned_call_is_left_out_and_its_beginning_still_trains() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], CALL, [10])
    add(graph, [*TASK, CALL, result("18")], [20], said("eighteen"), [11], delivered=False)

    assert shown(graph) == [([1], [10], [1])]


def test_an_answer_that_is_continued_trains_though_its_delivery_was_not_seen() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], CALL, [10], delivered=False)
    add(graph, [*TASK, CALL, result("18")], [20], said("18"), [11])

    assert shown(graph) == [([1], [10, 20, 11], [1, 0, 1])]


def test_retries_and_auxiliary_calls_have_their_kinds_and_no_row() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said("18"), [10])
    graph.beside(NodeKind.RETRY, 1, repeats=0)
    add(graph, [system("You are a title generator."), user("9+9?")], [7], said("A sum"), [30], auxiliary=True)

    kinds = [NodeKind.PROMPT, NodeKind.SAMPLED, NodeKind.RETRY, NodeKind.AUXILIARY, NodeKind.AUXILIARY]
    assert [node.kind for node in graph.nodes] == kinds
    assert shown(graph) == [([1], [10], [1])]


def test_a_graph_without_a_sampled_token_has_no_row() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1], said(""), [])

    assert training_rows(graph.nodes) == []
