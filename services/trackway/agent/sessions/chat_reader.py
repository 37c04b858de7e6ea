"""Reads the chat calls of a session: each has the fields and messages of the one before, and a few messages more.

What a call has in common with the one before is found by comparing their JSON, and is not validated and digested again.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json, to_json

from trackway.wire.chat import MAX_MESSAGES
from trackway.wire.openai.requests import ChatMessage
from trackway.wire.sessions import SessionChat


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
            known = [] if before is None else before.messages[: self._same(messages)]
            if before is not None and 0 < len(messages) <= MAX_MESSAGES:
                new = map(ChatMessage.model_validate, messages[len(known) :])
                call = before.model_copy(update={"messages": [*known, *new]})
            else:
                call = SessionChat.model_validate({**fields, "messages": messages})
        except ValueError:  # the errors of JSON name other types than those of Python's values
            return SessionChat.model_validate_json(body)
        if before is not None and self._digested[0] is before:
            self._digested = call, self._digested[1]
        self._call, self._sent, self._others = call, messages, others
        return call

    def _same(self, messages: Sequence[JsonValue]) -> int:
        """The number of messages at the beginning that the call before had."""
        same = 0
        for new, old in zip(messages, self._sent, strict=False):
            if new != old:
                break
            same += 1
        return same

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
        same = same_objects(models, self._models)
        if same == len(models) == len(self._models):
            return self
        new = accumulate(models[same:], _digest, initial=self._digests[same])
        return _Digests(models, [*self._digests[:same], *new])


def _digest(before: bytes, model: BaseModel) -> bytes:
    return sha256(before + model.model_dump_json().encode()).digest()


def same_objects(first: Sequence[object], second: Sequence[object]) -> int:
    """The number of objects at the beginning of both."""
    same = 0
    for one, other in zip(first, second, strict=False):
        if one is not other:
            break
        same += 1
    return same
