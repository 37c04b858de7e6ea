"""Requests in flight at an inference server: admission, progress, abort."""

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trackway.rollout.engines.admission import ModelFacts, RetryAfterEstimator, check_prompt, overloaded
from trackway.rollout.engines.protocol import FinishReason, Piece
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs, SamplingParams, TopLogprobs

T = TypeVar("T")

_FIRST_GUESS_S = 5.0


@dataclass(frozen=True)
class TokenChunk:
    """The next tokens of a request from a server. Only the last chunk has `finish_reason`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    names: Sequence[str]
    """For each token, the server's name of the newest weights that can have generated it. See `VersionNames`."""
    finish_reason: FinishReason | None = None
    top_logprobs: Sequence[TopLogprobs] = ()
    """The most likely tokens of each position, if the request asks for them."""
    all_names: Sequence[str] = ()
    """The name of the weights of each token of the response; in the last chunk of a server that reports it."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, if the request asks for it; in the chunk of the first token."""


@dataclass(eq=False)
class Call:
    """One request in flight."""

    request_id: str
    """The caller's id. Several requests may share it."""
    token_ids: list[int]
    params: SamplingParams
    stops: frozenset[int]
    """Stop ids, the model's own included unless ignored. Tokens after the first are dropped."""
    limit: int
    """Maximum number of generated tokens."""
    streamed: bool = True
    """True if the caller streams the tokens."""
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The id on the server: unique and no prefix of another, since SGLang aborts by prefix."""
    began: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    """Time of the last token or other progress on the server."""
    sent: bool = False
    held: str = ""
    """Name of the weights under which it was sent, the oldest that its tokens can be of."""
    reused: int = 0
    """Prompt tokens reused from the server's cache. Set by the backend when known."""
    only: str | None = None
    """When set, its KV cache contains rejected weights: tokens of weights other than these are dropped."""
    ends_at: float | None = None
    """Loop time at which an aborted request ends without the server's response."""
    _waits: asyncio.Timeout | None = None

    @property
    def cut(self) -> bool:
        """Return whether it was aborted."""
        return self.ends_at is not None

    def end_within(self, seconds: float) -> None:
        """End it with its tokens so far, unless the server has ended it by then."""
        self.ends_at = asyncio.get_running_loop().time() + seconds
        if self._waits is not None:
            self._waits.reschedule(self.ends_at)

    async def within(self, what: Callable[[], Awaitable[T]]) -> T:
        """Wait for `what`. TimeoutError when the call was aborted and its grace period is over."""
        if self.ends_at is not None and self.ends_at <= asyncio.get_running_loop().time():
            raise TimeoutError  # even if the server has sent more
        try:
            async with asyncio.timeout_at(self.ends_at) as self._waits:
                return await what()
        finally:
            self._waits = None


class Calls:
    """Admits requests by the rules shared by all engines, and counts them."""

    def __init__(self, settings: RolloutSettings, facts: ModelFacts, max_len: int) -> None:
        self._slots, self._bound = settings.max_num_seqs, settings.max_num_seqs + settings.max_queue
        self._facts, self._max_len = facts, max_len
        self._retry_after = RetryAfterEstimator(settings.max_num_seqs, _FIRST_GUESS_S)
        self._open: set[Call] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.generated = self.prefilled = self.reused = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def sent(self) -> list[Call]:
        """Requests sent to the server."""
        return [call for call in self._open if call.sent]

    def of(self, request_id: str | None) -> list[Call]:
        """Requests with a caller's id; all for None."""
        return [call for call in self._open if request_id in (None, call.request_id)]

    def admit(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str, *, streamed: bool = True
    ) -> Call:
        """Admit a request. Raises OVERLOADED, or INVALID_REQUEST for a prompt that cannot be continued."""
        if len(self._open) >= self._bound:
            waits = self._retry_after.turn_away(max(0, len(self._open) - self._slots), time.monotonic())
            raise overloaded(self._bound, waits)
        check_prompt(token_ids, self._max_len, self._facts.vocab_size)
        stops = frozenset(params.stop_token_ids)
        call = Call(
            request_id,
            list(token_ids),
            params,
            stops if params.ignore_eos and not params.structured_outputs else stops | self._facts.eos_token_ids,
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
            self._retry_after.left(time.monotonic() - call.began, len(self._open) + 1)
            self.reused += call.reused
            self.prefilled += len(call.token_ids) - call.reused

    def end_all(self, within_s: float) -> None:
        """Cut all."""
        for call in self._open:
            call.end_within(within_s)

    def moved(self) -> None:
        """Record progress on the server that produced no token yet."""
        for call in self.sent:
            call.moved = time.monotonic()

    async def drained(self) -> None:
        """Wait until no request is in flight."""
        await self._empty.wait()

    def running(self) -> int:
        """Number of requests running on the server, as far as its limit shows."""
        return min(self._slots, len(self._open))

    def still_for(self, since: float) -> float:
        """Seconds since the last token of any request, or since `since` if later. 0.0 without requests."""
        moved = max((call.moved for call in self._open), default=None)
        return 0.0 if moved is None else max(0.0, time.monotonic() - max(since, moved))


def runs(names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Runs of adjacent tokens with the same name: (name, start, end)."""
    start = 0
    for name, group in itertools.groupby(names):
        end = start + sum(1 for _ in group)
        yield name, start, end
        start = end


def until_stop(call: Call, got: TokenChunk, start: int, end: int, version: int) -> tuple[Piece, bool]:
    """Tokens [start, end) up to the first stop token, and whether there was one. The first piece has the scores."""
    stop = next((at + 1 for at in range(start, end) if got.token_ids[at] in call.stops), None)
    logprobs = [*got.logprobs[start : stop or end]]
    scores = got.prompt_logprobs if start == 0 else None
    values = logprobs if scores is None else [*logprobs, *scores.logprobs]
    if not all(map(math.isfinite, values)):
        message = f"expected finite logprobs, got {values} from weights version {version}; check the training run"
        raise TrackwayError(ErrorCode.ENGINE_FAILED, message)
    tops, ids = got.top_logprobs[start : stop or end], [*got.token_ids[start : stop or end]]
    return Piece(ids, logprobs, version, top_logprobs=tops, prompt_logprobs=scores), stop is not None
