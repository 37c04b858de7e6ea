"""The base model, which is the rollout service's. Clients name it by its folder's path or the end of that."""

import time
from pathlib import Path, PurePath
from typing import NamedTuple

from trackway.clients import Deadline, RolloutClient
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import BASE_POLICY, ModelCard, ModelList

ANSWER_S = 10.0
"""Longest wait for the rollout service's answer."""
_FRESH_S = 30.0
"""Seconds for which an answer of the rollout service is used."""


class BaseModelFacts(NamedTuple):
    """The model of the rollout service."""

    root: str
    """Path of its folder there."""
    policy: str
    """Name of the service's default policy, which a run may have trained."""
    max_len: int
    """Longest sequence in tokens."""

    @property
    def names(self) -> list[str]:
        """The names that this server lists: the path, and the folder's name."""
        return list(dict.fromkeys([self.root, PurePath(self.root).name]))

    def is_named(self, name: str) -> bool:
        """Return whether a client's name is its path, the end of it, or the default policy's name."""
        parts, end = Path(self.root).parts, PurePath(name).parts
        is_same = PurePath(name).is_absolute() and Path(name).resolve() == Path(self.root).resolve()
        return is_same or name == self.policy or (bool(end) and parts[-len(end) :] == end)

    def policy_of(self, name: str) -> str:
        """Return the policy that a client's name stands for: the untrained model for the model's path or its end."""
        return BASE_POLICY if self.is_named(name) and name != self.policy else name


class BaseModels:
    """Asks the rollout service for its model."""

    def __init__(self, rollout: RolloutClient) -> None:
        self._rollout = rollout
        self._facts: BaseModelFacts | None = None
        self._asked_at = 0.0

    async def facts(self) -> BaseModelFacts:
        """Return the model. Raises TrackwayError when the rollout service does not answer."""
        if self._facts is None or time.monotonic() - self._asked_at > _FRESH_S:
            card, *_ = await self._cards()
            self._facts = BaseModelFacts(card.root or card.id, card.id, card.max_model_len)
            self._asked_at = time.monotonic()
        return self._facts

    async def required(self, name: str) -> BaseModelFacts:
        """Return the model. Raises INVALID_REQUEST unless the client names it."""
        facts = await self.facts()
        if not facts.is_named(name):
            raise _unknown(name, facts, "name that, or serve another (model_path)")
        return facts

    async def require_sampled(self, name: str) -> None:
        """Raise INVALID_REQUEST unless the client names the model or a policy that the rollout service lists."""
        facts = await self.facts()
        if not facts.is_named(name) and name not in (policies := [card.id for card in await self._cards()]):
            raise _unknown(name, facts, f"name that or a policy ({', '.join(policies)})")

    async def _cards(self) -> list[ModelCard]:
        """Ask the rollout service for its model, which comes first, and its policies."""
        deadline = Deadline.after(ANSWER_S)
        return (await self._rollout.call("GET", "/v1/models", reply=ModelList, deadline=deadline)).data


def _unknown(name: str, facts: BaseModelFacts, remedy: str) -> TrackwayError:
    expected = " or ".join(facts.names)
    message = f"base_model: expected {expected}, the model of the rollout service, got {name}; {remedy}"
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)
