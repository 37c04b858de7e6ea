"""Which recorded node a call continues, however its client wrote the conversation down again."""

import pytest

from tests.services.agent.sessions.conversations import CALCULATOR, add, flattened, result, said, system, user
from trackway.agent.sessions.graph import Conversation, Place, TokenGraph, joined_turns
from trackway.wire.openai import ChatMessage
from trackway.wire.sessions import RootReason

TASK = [system("Be brief."), user("9+9?")]
ARGUMENTS = '{ "expression":  "9+9", "round": true }'
TEXT = "  I will use the tool. \n\n"


def after_one_turn() -> TokenGraph:
    graph = TokenGraph()
    add(graph, TASK, [1], said(TEXT, ARGUMENTS), [10])
    return graph


def placed(graph: TokenGraph, *messages: ChatMessage) -> Place:
    return graph.place(Conversation.of(joined_turns(messages)))


ECHOES = {
    "verbatim": [said(TEXT, ARGUMENTS)],
    "arguments serialised again": [said(TEXT, '{"round":true,"expression":"9+9"}')],
    "stripped text": [said(TEXT.strip(), ARGUMENTS)],
    "a list of parts": [said([{"type": "text", "text": TEXT}], ARGUMENTS)],  # pyright: ignore[reportArgumentType]
    "text and call in two items": [said(TEXT), said("", ARGUMENTS)],
    "the call before the text": [said("", ARGUMENTS), said(TEXT)],
    "the call as prose": [flattened(TEXT.strip(), '{"expression": "9+9", "round": true}')],
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES.keys())
def test_an_echo_of_the_same_meaning_continues_the_recorded_ids(echo: list[ChatMessage]) -> None:
    place = placed(after_one_turn(), *TASK, *echo, result("18"))

    assert (place.parent, place.known, place.reason) == (1, 3, None)


CHANGES = {
    "another argument": [said(TEXT, '{"expression": "9+8", "round": true}')],
    "another call id": [said(TEXT, ARGUMENTS, "call_9")],
    "other text": [said("I use the tool.", ARGUMENTS)],
    "no call": [said(TEXT)],
}


@pytest.mark.parametrize("echo", CHANGES.values(), ids=CHANGES.keys())
def test_another_meaning_continues_nothing(echo: list[ChatMessage]) -> None:
    place = placed(after_one_turn(), *TASK, *echo, result("18"))

    assert (place.parent, place.reason) == (None, RootReason.ASSISTANT_CHANGED)


def test_the_longest_recorded_beginning_is_continued() -> None:
    graph = after_one_turn()
    whole = [*TASK, said(TEXT, ARGUMENTS), result("18")]
    second = add(graph, whole, [20], said("18"), [11])

    place = placed(graph, *whole, said("18"), user("Sure?"))

    assert (place.parent, place.known) == (second.id, 5)


def test_a_later_turn_that_was_changed_is_a_root_though_the_first_turn_is_recorded() -> None:
    graph = after_one_turn()
    whole = [*TASK, said(TEXT, ARGUMENTS), result("18")]
    add(graph, whole, [20], said("18"), [11])

    assert placed(graph, *whole, said("19"), user("Sure?")).reason is RootReason.ASSISTANT_CHANGED


def test_a_developer_message_is_a_system_message() -> None:
    graph = after_one_turn()
    developer = ChatMessage(role="developer", content="Be brief.")

    assert placed(graph, developer, TASK[1], said(TEXT, ARGUMENTS), result("18")).parent == 1


def test_another_first_question_is_another_conversation() -> None:
    assert placed(after_one_turn(), TASK[0], user("8+8?")).reason is RootReason.OTHER_CONVERSATION


def test_tools_are_part_of_what_is_compared() -> None:
    graph = after_one_turn()
    conversation = Conversation.of([*TASK, said(TEXT, ARGUMENTS), result("18")], [CALCULATOR])

    assert graph.place(conversation).reason is RootReason.OTHER_TOOLS


def test_the_path_of_a_node_is_what_the_engine_saw_and_wrote() -> None:
    graph = TokenGraph()
    add(graph, TASK, [1, 2], said(TEXT, ARGUMENTS), [10, 11])
    node = add(graph, [*TASK, said(TEXT, ARGUMENTS), result("18")], [20], said("18"), [12])

    assert graph.ids(node.id) == [1, 2, 10, 11, 20, 12]
