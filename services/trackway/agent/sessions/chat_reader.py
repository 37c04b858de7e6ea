"""Reads the chat calls of a session: each has the messages and tools of the one before, and a few messages more.

What a call has in common with the one before is found by comparing their JSON, and is not validated and digested again.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import accumulate

from pydantic import BaseModel, JsonValue
from pydantic_core import from_json

from trackway.wire.sessions.calls import SessionChat

_LISTS = ("messages", "tools")


class ChatReader:
    """The calls of one session."""

    def __init__(self) -> None:
        self._json: dict[str, list[JsonValue]] = {}
        """The lists of the call before."""
        self._read: dict[str, list[BaseModel]] = {}
        """The same lists, validated."""
        self._digested = dict.fromkeys(_LISTS, _Digests())

    def read(self, body: bytes) -> SessionChat:
        """The call; raises ValidationError."""
        try:
            fields: JsonValue = from_json(body)
            if not isinstance(fields, dict):
                return SessionChat.model_validate_json(body)
            lists = {name: value for name in _LISTS if isinstance(value := fields.get(name), list)}
            call = SessionChat.model_validate(
                {**fields, **{name: self._with_known(name, value) for name, value in lists.items()}}
            )
        except ValueError:  # the errors of JSON name other types than those of Python's values
            return SessionChat.model_validate_json(body)
        self._json, self._read = lists, {"messages": [*call.messages], "tools": [*call.tools]}
        return call

    def _with_known(self, name: str, values: list[JsonValue]) -> list[object]:
        """The values, of which those at the beginning that the call before had are validated."""
        before = self._json.get(name, [])
        same = next((place for place, (new, old) in enumerate(zip(values, before, strict=False)) if new != old), None)
        same = min(len(values), len(before)) if same is None else same
        return [*self._read.get(name, [])[:same], *values[same:]]

    def digest(self, call: SessionChat) -> str:
        """Of all that the call asks for, without how it is sent (`stream`)."""
        self._digested = {name: self._digested[name].of(getattr(call, name)) for name in _LISTS}
        lists = " ".join(digests.last.hex() for digests in self._digested.values())
        return f"{lists} {call.model_dump_json(exclude={'messages', 'tools', 'stream', 'stream_options'})}"


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
