"""The requests that a replica has in flight at its inference server: who is let in, who moves, who is cut."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trackway.rollout.engines.admission import check_prompt, overloaded
from trackway.rollout.engines.backpressure import RetryAfterEstimator
from trackway.rollout.engines.protocol import FinishReason
from trackway.rollout.engines.remote.model_info import ModelFacts
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams

T = TypeVar("T")

_FIRST_GUESS_S = 5.0


@dataclass(frozen=True)
class Tokens:
    """The next tokens of a request as a server tells them; `finish_reason` only in the last."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    names: Sequence[str]
    """For each token the server's name of the weights that made it; see `VersionNames`."""
    finish_reason: FinishReason | None = None


@dataclass(eq=False)
class Call:
    """One request in flight."""

    request_id: str
    """The caller's; several may share it."""
    token_ids: list[int]
    params: SamplingParams
    stops: frozenset[int]
    """Ids that end it, the model's own included unless they are ignored; what a server sends after one is dropped."""
    limit: int
    """Tokens it may still make."""
    streamed: bool = True
    """Whether the caller wants its tokens as they are made."""
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The server's name of it: unique, and no other begins alike, since SGLang aborts by prefix."""
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    """When it last got a token, or the server got on with it."""
    sent: bool = False
    reused: int = 0
    """Prompt tokens that the server took from its cache; a backend sets it when it learns it."""
    only: str | None = None
    """When set, its KV cache met weights that were refused: tokens of other weights than these are dropped."""
    ends_at: float | None = None
    """Loop time at which it ends even when the server says nothing more."""
    _waits: asyncio.Timeout | None = None

    @property
    def cut(self) -> bool:
        """Whether it was told to end."""
        return self.ends_at is not None

    def end_within(self, seconds: float) -> None:
        """End it with what it has when the server has not done so by then."""
        self.ends_at = asyncio.get_running_loop().time() + seconds
        if self._waits is not None:
            self._waits.reschedule(self.ends_at)

    async def within(self, what: Awaitable[T]) -> T:
        """Wait for `what`; TimeoutError when the call was cut and its grace is over."""
        try:
            async with asyncio.timeout_at(self.ends_at) as self._waits:
                return await what
        finally:
            self._waits = None


class Calls:
    """Lets requests in by the rules that all engines keep, and counts them."""

    def __init__(self, settings: RolloutSettings, facts: ModelFacts, max_len: int) -> None:
        self._slots, self._bound = settings.max_num_seqs, settings.max_num_seqs + settings.max_queue
        self._facts, self._max_len = facts, max_len
        self._places = RetryAfterEstimator(settings.max_num_seqs, _FIRST_GUESS_S)
        self._open: set[Call] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.generated = self.prefilled = self.reused = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def sent(self) -> list[Call]:
        """Those that the server has."""
        return [call for call in self._open if call.sent]

    def of(self, request_id: str | None) -> list[Call]:
        """Those of a caller's id; all for None."""
        return [call for call in self._open if request_id in (None, call.request_id)]

    def admit(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, *, streamed: bool = True
    ) -> Call:
        """Take one in; raises OVERLOADED, or INVALID_REQUEST for a prompt that cannot be continued."""
        if len(self._open) >= self._bound:
            waits = self._places.turn_away(max(0, len(self._open) - self._slots), time.monotonic())
            raise overloaded(self._bound, waits)
        check_prompt(token_ids, self._max_len, self._facts.vocab_size)
        stops = frozenset(params.stop_token_ids)
        call = Call(
            request_id,
            list(token_ids),
            params,
            stops if params.ignore_eos else stops | self._facts.eos_token_ids,
            min(params.max_tokens, self._max_len - len(token_ids)),
            streamed,
        )
        self._open.add(call)
        self._empty.clear()
        return call

    def close(self, call: Call) -> None:
        """It has ended."""
        self._open.discard(call)
        if not self._open:
            self._empty.set()
        if call.sent:
            self._places.left(time.monotonic() - call.began, len(self._open) + 1)
            self.reused += call.reused
            self.prefilled += len(call.token_ids) - call.reused

    def end_all(self, within_s: float) -> None:
        """Cut all."""
        for call in self._open:
            call.end_within(within_s)

    def moved(self) -> None:
        """The server got on with what it has, although no token of it came."""
        for call in self.sent:
            call.moved = time.monotonic()

    async def drained(self) -> None:
        """Return when none is in flight."""
        await self._empty.wait()

    def running(self) -> int:
        """How many the server works on, as far as its bound tells."""
        return min(self._slots, len(self._open))

    def still_for(self, since: float) -> float:
        """Seconds since any of them got a token, or since `since` if that is later; 0.0 without any."""
        moved = max((call.moved for call in self._open), default=None)
        return 0.0 if moved is None else max(0.0, time.monotonic() - max(since, moved))
