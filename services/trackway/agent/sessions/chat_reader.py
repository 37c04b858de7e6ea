"""Reads the chat calls of a session: each has the messages and tools of the one before, and a few messages more.

What a call has in common with the one before is found by comparing their JSON, and is not validated and digested again.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json, to_json

from trackway.wire.sessions.calls import SessionChat

_LISTS = ("messages", "tools")


class ChatReader:
    """The calls of one session."""

    def __init__(self) -> None:
        self._sent: dict[str, Sequence[object]] = {}
        """The lists of the call before, as they are compared."""
        self._read: dict[str, Sequence[BaseModel]] = {}
        """The same lists, validated."""
        self._digested = dict.fromkeys(_LISTS, _Digests())

    def read(self, body: bytes) -> SessionChat:
        """The call; raises ValidationError."""
        try:
            fields: JsonValue = from_json(body)
            if not isinstance(fields, dict):
                return SessionChat.model_validate_json(body)
            lists = {name: value for name in _LISTS if isinstance(value := fields.get(name), list)}
            sent = {name: _comparable(name, values) for name, values in lists.items()}
            known = {name: self._with_known(name, sent[name], values) for name, values in lists.items()}
            call = SessionChat.model_validate({**fields, **known})
        except ValueError:  # the errors of JSON name other types than those of Python's values
            return SessionChat.model_validate_json(body)
        self._sent, self._read = sent, {"messages": [*call.messages], "tools": [*call.tools]}
        return call

    def _with_known(self, name: str, sent: Sequence[object], values: list[JsonValue]) -> list[object]:
        """The values, of which those at the beginning that the call before had are validated."""
        same = 0
        for new, old in zip(sent, self._sent.get(name, ()), strict=False):
            if new != old:
                break
            same += 1
        return [*self._read.get(name, ())[:same], *values[same:]]

    def digest(self, call: SessionChat) -> str:
        """Of all that the call asks for, without how it is sent (`stream`)."""
        self._digested = {name: self._digested[name].of(getattr(call, name)) for name in _LISTS}
        lists = " ".join(digests.last.hex() for digests in self._digested.values())
        return f"{lists} {call.model_dump_json(exclude={'messages', 'tools', 'stream', 'stream_options'})}"


def _comparable(name: str, values: list[JsonValue]) -> Sequence[object]:
    """What is equal for equal values only: a tool may have numbers, and Python's 1, 1.0 and True are equal."""
    return values if name == "messages" else [to_json(value) for value in values]


class _Digests:
    """Digests of the first 0, 1, 2, ... of some models."""

    def __init__(self, models: Sequence[BaseModel] = (), digests: Sequence[bytes] = (b"",)) -> None:
        self._models, self._digests = models, digests

    @property
    def last(self) -> bytes:
        """That of all."""
        return self._digests[-1]

    def of(self, models: Sequence[BaseModel]) -> "_Digests":
        """Those of other models; of the objects that both have at their beginning they are known."""
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
