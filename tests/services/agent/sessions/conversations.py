"""Short ways to write conversations and calls of a token graph."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from trackway.agent.sessions.graph import Conversation, Sampled, TokenGraph, joined_turns, meaning
from trackway.wire.openai import ChatMessage, ChatTool
from trackway.wire.sessions import GraphNode
from trackway.wire.trajectory import WeightSpan

CALCULATOR = ChatTool.model_validate({"type": "function", "function": {"name": "calculator", "parameters": {}}})


def system(text: str) -> ChatMessage:
    return ChatMessage(role="system", content=text)


def user(text: str) -> ChatMessage:
    return ChatMessage(role="user", content=text)


def said(text: str, arguments: str | None = None, call_id: str = "call_0", **fields: JsonValue) -> ChatMessage:
    """A message of the model, with a call of the calculator if it has arguments."""
    calls = [{"id": call_id, "function": {"name": "calculator", "arguments": arguments}}] if arguments else None
    return ChatMessage.model_validate({"role": "assistant", "content": text, "tool_calls": calls, **fields})


def result(text: str, call_id: str = "call_0") -> ChatMessage:
    return ChatMessage(role="tool", content=text, tool_call_id=call_id)


def flattened(text: str, arguments: str, call_id: str = "call_0") -> ChatMessage:
    """The same message as smolagents sends it: the call as a Python list in the text."""
    function = {"name": "calculator", "arguments": json.loads(arguments)}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return ChatMessage.model_validate(
        {"role": "assistant", "content": [{"type": "text", "text": f"{text}\nCalling tools:\n{calls}"}]}
    )


def add(
    graph: TokenGraph,
    messages: Sequence[ChatMessage],
    new: list[int],
    reply: ChatMessage,
    written: list[int],
    version: int = 1,
    tools: Sequence[ChatTool] = (),
    auxiliary: bool = False,
    delivered: bool = True,
    guided: bool = False,
) -> GraphNode:
    """One call: the engine is shown the ids `new` behind what the call continues, and writes the ids `written`."""
    conversation = Conversation.of(joined_turns(messages), tools)
    number = graph.calls
    graph.calls += 1
    context = graph.context(graph.place(conversation), number, new, auxiliary)
    logprobs = [-token / 100 for token in written]
    spans = [WeightSpan(version=version, start=0, end=len(written))]
    node = graph.sampled(context, number, Sampled(written, logprobs, spans, "stop", guided))
    graph.continue_message(node, conversation, meaning(reply))
    node.delivered = delivered
    return node
