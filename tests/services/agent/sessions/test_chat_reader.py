"""Chat calls of a session are read alike, whatever the call before them had."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tests.services.agent.sessions.conversations import CALCULATOR, result, said, system, user
from trackway.agent.sessions.graph import ChatReader, Conversation, Conversations
from trackway.wire.sessions import SessionChat

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"minimum": 1}}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": "{}"}}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "9 + 9?"}]
LATER = [{"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "18"}]
BODY: dict[str, Any] = {"model": "any", "messages": MESSAGES, "tools": [TOOL]}

CHANGED: dict[str, dict[str, Any]] = {
    "the same": {},
    "two messages more": {"messages": [*MESSAGES, *LATER]},
    "another first message": {"messages": [MESSAGES[1], MESSAGES[1]]},
    "another last message": {"messages": [MESSAGES[0], {"role": "user", "content": "9 + 8?"}]},
    "a message less": {"messages": MESSAGES[:1]},
    "another tool": {"tools": [{"type": "function", "function": {"name": "multiply"}}]},
    "a number of another type": {"tools": [{**TOOL, "function": {"name": "add", "parameters": {"minimum": True}}}]},
    "no tools": {"tools": None},
    "several choices": {"n": 2},
    "a bound": {"max_tokens": 5},
}
WRONG: dict[str, Any] = {
    "a message with an unknown role after known messages": {
        **BODY,
        "messages": [*MESSAGES, {"role": "nobody", "content": ""}],
    },
    "a wrong tool behind a known one": {**BODY, "tools": [TOOL, {"type": "function", "function": {}}]},
    "no list": {**BODY, "messages": "9 + 9?"},
    "an unknown field": {**BODY, "stream": "perhaps"},
    "no object": [BODY],
}


def sent(body: object) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED.keys())
def test_a_call_is_read_as_if_it_were_the_first(changes: dict[str, Any]) -> None:
    reader, body = ChatReader(), sent({**BODY, **changes})
    reader.digest(reader.read(sent(BODY)))

    call = reader.read(body)

    assert call.model_dump_json() == SessionChat.model_validate_json(body).model_dump_json()
    assert reader.digest(call) == ChatReader().digest(SessionChat.model_validate_json(body))


def test_what_the_call_before_had_is_not_validated_again() -> None:
    reader = ChatReader()
    first = reader.read(sent(BODY))
    second = reader.read(sent({**BODY, "messages": [*MESSAGES, *LATER]}))
    assert [message is other for message, other in zip(second.messages, first.messages, strict=False)] == [True, True]
    assert second.tools[0] is first.tools[0]


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_call_has_the_errors_of_its_json_and_the_next_one_is_read(wrong: object) -> None:
    reader = ChatReader()
    reader.read(sent(BODY))
    with pytest.raises(ValidationError) as expected:
        SessionChat.model_validate_json(sent(wrong))

    with pytest.raises(ValidationError) as got:
        reader.read(sent(wrong))

    assert got.value.errors(include_url=False) == expected.value.errors(include_url=False)
    assert reader.read(sent(BODY)).messages[1].content == "9 + 9?"


def test_the_digest_tells_calls_apart_by_all_but_how_they_are_sent() -> None:
    reader = ChatReader()
    digests = {name: reader.digest(reader.read(sent({**BODY, **changes}))) for name, changes in CHANGED.items()}
    assert len(set(digests.values())) == len(CHANGED)
    streamed = sent({**BODY, "stream": True, "stream_options": {"include_usage": True}})
    assert reader.digest(reader.read(streamed)) == digests["the same"]


def test_a_conversation_does_not_depend_on_the_calls_before_it() -> None:
    task, turn = [system("Be brief."), user("9+9?")], [said("", '{"expression": "9+9"}'), result("18")]
    calls = [
        (task, [], {}),
        ([*task, *turn], [], {}),
        ([*task, *turn], [CALCULATOR], {}),
        ([*task, *turn], [CALCULATOR], {"thinking": True}),
        ([*task, turn[0], result("19")], [CALCULATOR], {"thinking": True}),
        (task, [], {}),
    ]
    known = Conversations()
    assert [known.of(*call) for call in calls] == [Conversation.of(*call) for call in calls]
