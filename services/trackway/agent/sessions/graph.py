"""The token graph of a session: what was sampled is never tokenised again.

A call continues the sampled node whose conversation, compared by meaning, is the longest beginning of its messages;
what follows is rendered behind that node's recorded ids. A call that changes what the model wrote, or continues
nothing, begins a root, with the reason. So parallel branches and sub-agents are paths of one graph.

Messages of equal meaning are what a model wrote and what a client wrote down again of it. Clients serialise arguments
again, strip text, reorder items, and flatten calls to prose (`[{'id': ..., 'function': ...}]` after "Calling tools:",
smolagents).

Each call has the fields and messages of the one before, and a few messages more. The common part is found by comparing
their JSON, and is not validated and digested again.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate, takewhile
from typing import NamedTuple

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json, to_json

from trackway.wire.chat import MAX_MESSAGES, Message, ToolCall
from trackway.wire.openai import ChatMessage, ChatRequest, ChatTool
from trackway.wire.sessions import GraphNode, NodeKind, RootReason, SessionChat
from trackway.wire.trajectory import WeightSpan

_FLATTENED = "Calling tools:"
_MAX_FLATTENED = 65_536
"""Characters of a flattened call that are parsed."""
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_MAX_KNOWN = 1024
"""Messages of one session whose meaning is kept."""
_TITLE = re.compile(r"\btitle generator\b|\bgenerate an? [^.\n]{0,80}\btitle\b", re.IGNORECASE)
"""Instructions of a call that names a conversation, as opencode and Claude Code make beside the task."""


class CallMeaning(NamedTuple):
    """One tool call: arguments as canonical JSON."""

    id: str
    name: str
    arguments: str


class Meaning(NamedTuple):
    """One message up to white space and serialisation."""

    role: str
    text: str
    """Words joined by single spaces."""
    calls: tuple[CallMeaning, ...] = ()
    call_id: str = ""
    """Id of the call that a tool's message answers."""


def joined_turns(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with neighbouring ones of the model joined: Responses sends its text and calls one by one."""
    joined: list[ChatMessage] = []
    for message in messages:
        if joined and message.role == "assistant" == joined[-1].role:
            joined[-1] = _both(joined[-1], message)
        else:
            joined.append(message)
    return joined


def meaning(message: ChatMessage) -> Meaning:
    """Meaning of the message."""
    role = "system" if message.role == "developer" else message.role
    text = message.text
    calls = tuple(_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls)
    if role == "assistant" and not calls:
        text, calls = _unflattened(text)
    if message.reasoning_content:
        text = f"{message.reasoning_content} {text}"
    return Meaning(role, _words(text), calls, message.tool_call_id or "")


class _KnownMeanings:
    """The meanings of a session's messages: most of a call's messages were in the call before."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Meaning] = {}

    def __call__(self, message: ChatMessage) -> Meaning:
        """Meaning of the message."""
        calls = [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
        key = (message.role, message.text, *calls, message.tool_call_id, message.reasoning_content)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = meaning(message)
        return known


def plain_message(message: ChatMessage) -> Message:
    """The message with its text in one piece, and a role that chat templates know."""
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=message.text,
        tool_calls=message.tool_calls or None,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def is_auxiliary(chat: ChatRequest) -> bool:
    """Return whether the call looks as if beside the task: its first message asks for a title, and it offers no
    tools."""
    first = chat.messages[0]
    return (
        not chat.tools
        and first.role in ("system", "developer")
        and all(message.role != "assistant" for message in chat.messages)
        and bool(_TITLE.search(first.text))
    )


def _without_reasoning(said: Meaning) -> Meaning:
    """The message without what stands between <think> and </think>."""
    before, tag, behind = said.text.partition("</think>")
    return said._replace(text=behind.strip()) if tag else said._replace(text=before)


def canonical(value: JsonValue) -> str:
    """JSON with sorted keys and without white space."""
    return _CANONICAL.encode(value)


def _both(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    texts = [message.text for message in (first, second) if message.text]
    return first.model_copy(
        update={
            "content": "\n".join(texts),
            "tool_calls": [*first.tool_calls, *second.tool_calls],
            "reasoning_content": first.reasoning_content or second.reasoning_content,
        }
    )


def _call(call_id: str, name: str, arguments: str) -> CallMeaning:
    try:
        return CallMeaning(call_id, name, canonical(json.loads(arguments)))
    except (ValueError, RecursionError):
        return CallMeaning(call_id, name, _words(arguments))


def _unflattened(text: str) -> tuple[str, tuple[CallMeaning, ...]]:
    """The text before smolagents' list of calls, and the calls. The text alone if it ends with none.

    A call whose arguments are in the text is not one: CodeAgent repeats the code of its text as a call.
    """
    before, marker, listed = text.rpartition(_FLATTENED)
    if not marker or len(listed) > _MAX_FLATTENED:
        return text, ()
    try:
        calls = [ToolCall.model_validate(_with_json_arguments(call)) for call in ast.literal_eval(listed.strip())]
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text, ()
    calls = [call for call in calls if not _is_quoted(call.function.arguments, before)]
    return before, tuple(_call(call.id, call.function.name, call.function.arguments) for call in calls)


def _is_quoted(arguments: str, text: str) -> bool:
    """Return whether the arguments are code of the text, and no JSON object."""
    code = _words(arguments)
    return bool(code) and not code.startswith("{") and code in _words(text)


def _words(text: str) -> str:
    return " ".join(text.split())


def _with_json_arguments(call: dict[str, dict[str, JsonValue]]) -> dict[str, object]:
    function = call["function"]
    arguments = function["arguments"]
    return {
        **call,
        "function": {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)},
    }


class ChatReader:
    """The calls of one session."""

    def __init__(self) -> None:
        self._call: SessionChat | None = None
        """The call before."""
        self._sent: list[JsonValue] = []
        """Its messages, not validated."""
        self._others = b""
        """Its other fields as JSON, which tells 1, 1.0 and true apart, unlike Python."""
        self._digests = _Digests()
        self._digested: tuple[SessionChat | None, str] = None, ""
        """A call, and its fields without the messages as digests have them."""

    def read(self, body: bytes) -> SessionChat:
        """The call. Raises ValidationError."""
        try:
            fields: JsonValue = from_json(body)
            if not isinstance(fields, dict) or not isinstance(messages := fields.pop("messages", None), list):
                return SessionChat.model_validate_json(body)
            others = to_json(fields)
            before = self._call if others == self._others else None
            known = [] if before is None else before.messages[: _common(messages, self._sent)]
            if before is not None and 0 < len(messages) <= MAX_MESSAGES:
                new = map(ChatMessage.model_validate, messages[len(known) :])
                call = before.model_copy(update={"messages": [*known, *new]})
            else:
                call = SessionChat.model_validate({**fields, "messages": messages})
        except ValueError:  # JSON's errors name other types than Python's
            return SessionChat.model_validate_json(body)
        if before is not None and self._digested[0] is before:
            self._digested = call, self._digested[1]
        self._call, self._sent, self._others = call, messages, others
        return call

    def digest(self, call: SessionChat) -> str:
        """Digest of all that the call asks for, without how it is sent (`stream`)."""
        if self._digested[0] is not call:
            self._digested = call, call.model_dump_json(exclude={"messages", "stream", "stream_options"})
        self._digests = self._digests.of(call.messages)
        return f"{self._digests.last.hex()} {self._digested[1]}"


class _Digests:
    """Digests of the first 0, 1, 2, ... of some models."""

    def __init__(self, models: Sequence[BaseModel] = (), digests: Sequence[bytes] = (b"",)) -> None:
        self._models, self._digests = models, digests

    @property
    def last(self) -> bytes:
        """That of all."""
        return self._digests[-1]

    def of(self, models: Sequence[BaseModel]) -> "_Digests":
        """Digests of other models. Objects that both lists begin with are not digested again."""
        same = _common(models, self._models, operator.is_)
        if same == len(models) == len(self._models):
            return self
        new = accumulate(models[same:], _digest, initial=self._digests[same])
        return _Digests(models, [*self._digests[:same], *new])


def _digest(before: bytes, model: BaseModel) -> bytes:
    return sha256(before + model.model_dump_json().encode()).digest()


def _common(
    first: Sequence[object], second: Sequence[object], are_same: Callable[[object, object], bool] = operator.eq
) -> int:
    """The number of objects at the beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: are_same(*pair), zip(first, second, strict=False)))


@dataclass(frozen=True)
class Conversation:
    """The messages of a call, and what else its prompt depends on."""

    said: tuple[Meaning, ...]
    options: str
    """Tools and template variables, as canonical JSON."""
    keys: tuple[bytes, ...]
    """Digests of its options with the first 0, 1, 2, ... messages. The last covers the whole conversation."""

    @classmethod
    def of(
        cls,
        messages: Sequence[ChatMessage],
        tools: Sequence[ChatTool] = (),
        template: Mapping[str, JsonValue] | None = None,
        meaning_of: Callable[[ChatMessage], Meaning] = meaning,
    ) -> "Conversation":
        """The conversation of these messages. Neighbouring ones of the model are to be joined before."""
        values: list[JsonValue] = [[tool.model_dump(mode="json") for tool in tools], {**(template or {})}]
        options = canonical(values)
        conversation = cls((), options, (sha256(options.encode()).digest(),))
        return conversation.followed_by(*map(meaning_of, messages))

    def first(self, count: int) -> "Conversation":
        """The conversation up to so many messages."""
        return Conversation(self.said[:count], self.options, self.keys[: count + 1])

    def followed_by(self, *said: Meaning) -> "Conversation":
        """The conversation with these messages after it."""
        keys = list(accumulate(said, _key_of, initial=self.keys[-1]))
        return Conversation((*self.said, *said), self.options, (*self.keys, *keys[1:]))


class Conversations:
    """The conversations of a session's calls. What one shares with the one before is not worked out again."""

    def __init__(self) -> None:
        self.meaning = _KnownMeanings()
        self._messages: Sequence[ChatMessage] = ()
        self._tools: Sequence[ChatTool] = ()
        self._template: Mapping[str, JsonValue] = {}
        self._last = Conversation.of(())

    def of(
        self, messages: Sequence[ChatMessage], tools: Sequence[ChatTool], template: Mapping[str, JsonValue]
    ) -> Conversation:
        """Implement `Conversation.of`."""
        if tools != self._tools or template != self._template:
            self._last, self._messages = Conversation.of((), tools, template), ()
        same = _common(messages, self._messages, operator.is_)
        self._last = self._last.first(same).followed_by(*map(self.meaning, messages[same:]))
        self._messages, self._tools, self._template = messages, tools, template
        return self._last


class Place(NamedTuple):
    """Place of a call."""

    parent: int | None
    """The sampled node that it continues, or None for a root."""
    known: int
    """Messages of the call that the parent's conversation has."""
    reason: RootReason | None
    """Why it begins a root."""
    key: bytes
    """Digest of the whole conversation."""


class Sampled(NamedTuple):
    """One choice of the model."""

    ids: list[int]
    logprobs: list[float]
    weight_versions: list[WeightSpan]
    finish_reason: str
    """`abort` when the client left, or the generation failed."""
    guided: bool = False
    """True if a grammar guided it."""


@dataclass
class TokenGraph:
    """The nodes of one session, in the order in which they were added."""

    nodes: list[GraphNode] = field(default_factory=list)
    _by_key: dict[bytes, int] = field(default_factory=dict)
    """Sampled nodes by the digest of their conversation; the newest of equal ones."""
    _contexts: dict[tuple[int | None, bytes], int] = field(default_factory=dict)
    """Prompt and observation nodes by parent and by the digest of the conversation that they complete."""
    _conversations: dict[int, Conversation] = field(default_factory=dict)
    """The conversation of each sampled node, its own message included."""
    _texts: dict[int, str | None] = field(default_factory=dict)
    """Sampled nodes of text completions: prompt and completion as text; None for a prompt of ids."""
    _last: int | None = None
    _path: list[GraphNode] = field(default_factory=list[GraphNode])
    """The path to the node `_last`, with which most paths begin."""
    calls: int = 0
    """Calls so far."""
    has_task: bool = False
    """True if a call was about the task. Without one, the calls that look auxiliary are the task."""

    def place(self, conversation: Conversation) -> Place:
        """Place of a call with this conversation; adds nothing."""
        said, keys = conversation.said, conversation.keys
        for known in range(len(said), 0, -1):
            parent = self._by_key.get(keys[known])
            if parent is None:
                continue
            if all(message.role != "assistant" for message in said[known:]):
                return Place(parent, known, None, keys[-1])
            break  # what the model wrote later was changed
        return Place(None, 0, self._reason(conversation), keys[-1])

    def place_text(self, prompt: str | list[int]) -> Place:
        """Place of a completion: behind the longest recorded text, or ids, with which its prompt begins."""
        longest, parent = 0, None
        for node, text in self._texts.items():
            known = text if isinstance(prompt, str) else self.ids(node)
            if known is not None and longest < len(known) and prompt[: len(known)] == known:
                longest, parent = len(known), node
        reason = RootReason.OTHER_CONVERSATION if self.nodes else RootReason.FIRST_CALL
        return Place(parent, longest, None if parent is not None else reason, sha256(repr(prompt).encode()).digest())

    def path(self, node: int | None) -> list[GraphNode]:
        """The nodes from the root to this one."""
        behind: list[GraphNode] = []
        above = node
        while above is not None and above != self._last:
            behind.append(self.nodes[above])
            above = self.nodes[above].parent
        self._last, self._path = node, [*(self._path if above is not None else []), *reversed(behind)]
        return self._path

    def ids(self, node: int | None) -> list[int]:
        """The ids from the root to this node."""
        ids: list[int] = []
        for step in self.path(node):
            ids += step.ids
        return ids

    def context(self, place: Place, call: int, ids: Sequence[int], auxiliary: bool = False) -> GraphNode:
        """The node of what the engine is shown beyond the parent. That of an equal earlier call if there is one."""
        for step in self.path(place.parent):
            if step.kind is NodeKind.AUXILIARY:  # a title is not continued
                self._is_of_task(step)
        found = self._contexts.get((place.parent, place.key))
        if found is not None and self.nodes[found].ids == list(ids):
            return self.nodes[found]
        kind = NodeKind.PROMPT if place.parent is None else NodeKind.OBSERVATION
        node = self._add(
            GraphNode(
                id=len(self.nodes),
                parent=place.parent,
                kind=NodeKind.AUXILIARY if auxiliary else kind,
                call=call,
                ids=list(ids),
                reason=place.reason,
            )
        )
        self._contexts[place.parent, place.key] = node.id
        return node

    def sampled(self, context: GraphNode, call: int, choice: Sampled, forced: str = "") -> GraphNode:
        """Add a choice that the engine wrote after the context, whose end is `forced` as the start of the message."""
        auxiliary = context.kind is NodeKind.AUXILIARY
        return self._add(
            GraphNode(
                id=len(self.nodes),
                parent=context.id,
                kind=NodeKind.AUXILIARY if auxiliary else NodeKind.SAMPLED,
                call=call,
                ids=choice.ids,
                logprobs=choice.logprobs,
                weight_versions=choice.weight_versions,
                finish_reason=choice.finish_reason,
                forced=forced,
                guided=choice.guided,
                delivered=False,
            )
        )

    def settle(self) -> None:
        """Let what looked auxiliary be the task when the session had no other call."""
        if not self.has_task:
            for node in self.nodes:
                if node.ids and node.kind is NodeKind.AUXILIARY:
                    self._is_of_task(node)

    def _is_of_task(self, node: GraphNode) -> None:
        node.kind = NodeKind.PROMPT if node.parent is None else NodeKind.SAMPLED

    def continue_text(self, node: GraphNode, text: str | None) -> None:
        """Let completions continue a sampled node by the text up to its end, or by its ids for None."""
        self._texts[node.id] = text

    def continue_message(self, node: GraphNode, conversation: Conversation, said: Meaning) -> None:
        """Let calls continue a sampled node whose message the client was given as `said`."""
        whole = conversation.followed_by(said)
        self._conversations[node.id] = whole
        self._by_key[whole.keys[-1]] = node.id

    def beside(self, kind: NodeKind, call: int, repeats: int | None = None) -> GraphNode:
        """Add a node without tokens: a retry of an earlier call, or an auxiliary call."""
        return self._add(GraphNode(id=len(self.nodes), kind=kind, call=call, repeats=repeats))

    def _add(self, node: GraphNode) -> GraphNode:
        self.nodes.append(node)
        return node

    def _reason(self, conversation: Conversation) -> RootReason:
        """Why the call continues no sampled node: how it differs from the earlier conversation that is most like it."""
        of_task = [
            other for node, other in self._conversations.items() if self.nodes[node].kind is not NodeKind.AUXILIARY
        ]
        if not of_task:
            return RootReason.FIRST_CALL
        said = conversation.said
        earlier = max(of_task, key=lambda other: _common(said, other.said))
        same = _common(said, earlier.said)
        if earlier.options != conversation.options and same and same >= min(len(said), len(earlier.said) - 1):
            return RootReason.OTHER_TOOLS
        if same < min(len(said), len(earlier.said)) and earlier.said[same].role == said[same].role == "assistant":
            stripped = _without_reasoning(earlier.said[same]) == _without_reasoning(said[same])
            return RootReason.REASONING_STRIPPED if stripped else RootReason.ASSISTANT_CHANGED
        if same == 0 and "system" in (said[0].role, earlier.said[0].role):
            return RootReason.OTHER_SYSTEM_PROMPT
        begun = any(message.role == "assistant" for message in earlier.said[:same])
        shortened = len(said) > same + 1 or any(message.role == "assistant" for message in said)
        return RootReason.HISTORY_CHANGED if begun or shortened else RootReason.OTHER_CONVERSATION


def _key_of(before: bytes, message: Meaning) -> bytes:
    values = (message.role, message.text, message.call_id, *(text for call in message.calls for text in call))
    return sha256(before + repr(values).encode()).digest()
