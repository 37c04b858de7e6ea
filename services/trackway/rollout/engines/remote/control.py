"""Requests in flight at an inference server, and its pauses, weight updates, sleep and wake-up.

During an update new requests wait and those in flight are frozen while the folder is loaded under a unique name. They
then continue, and the server's digests and its logprobs of the probes are compared with the proof. Tokens of the new
weights are held back until they are verified. If verification fails, the last good folder is loaded again, and
requests that used the rejected weights are aborted, so their tokens are never returned.
"""

import asyncio
import itertools
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from trackway.rollout.engines.admission import ModelFacts, RetryAfterEstimator, asleep, check_prompt, overloaded
from trackway.rollout.engines.protocol import FinishReason, MemoryPart, PauseMode, Piece
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement, judge, require_accepted
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import PromptLogprobs, SamplingParams, TopLogprobs
from trackway.wire.weights import WeightProof

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


CUT_GRACE_S = 5.0
_REMEMBERED = 1000


class VersionNames:
    """Names of versions on a server: "7", and "7+1" when 7 is loaded again."""

    def __init__(self) -> None:
        self._given: dict[str, int] = {}
        self._highest, self._again = -1, 0

    def new(self, version: int) -> str:
        """A name that was not used before."""
        if version > self._highest:
            self._highest, name = version, str(version)
        else:
            self._again += 1
            name = f"{version}+{self._again}"
        self._given[name] = version
        if len(self._given) > _REMEMBERED:
            del self._given[next(iter(self._given))]
        return name

    def version(self, name: str) -> int | None:
        """The version of a name, or None for an unknown name."""
        return self._given.get(name)


@dataclass(frozen=True)
class Serving:
    """Weights loaded on a server, with their name there."""

    folder: Path
    version: int
    name: str


@dataclass(frozen=True)
class _Trial:
    """Weights under verification. `over` is set once they are accepted or rejected."""

    new: Serving
    old: Serving
    proof: WeightProof
    before: list[list[float]] | None
    """The server's logprobs of the probes before the load, if available."""
    over: asyncio.Event


class ServerCalls(Protocol):
    """Abilities of a server, and whether it runs requests or holds their memory."""

    loses_weights_asleep: bool
    """True if weights must be loaded again after sleep."""
    answers_frozen: bool
    """True if a request aborted while frozen returns at once."""
    shared: bool
    """True if other runs use the server, which is then never frozen: requests keep the adapter that they began with."""

    async def freeze(self) -> None:
        """Pause and keep the KV cache. Idempotent."""
        ...

    async def thaw(self) -> None:
        """Continue. Idempotent."""
        ...

    async def swap(self, folder: Path, name: str) -> None:
        """While frozen: load the weights as `name`; no new request reuses old KV."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs at temperature 1 of tokens 1..n-1 under the loaded weights."""
        ...

    async def digests(self, folder: Path, before: Path) -> HeldDigests | None:
        """Compares the server's parameters with the folder's tensors. None if it has no digests."""
        ...

    async def cut(self, calls: Sequence[Call]) -> None:
        """Abort these requests (by `call.rid`)."""
        ...

    async def give_back(self, part: MemoryPart) -> None:
        """Release memory; needs SLEEP."""
        ...

    async def take_again(self, part: MemoryPart) -> None:
        """Allocate memory; needs SLEEP."""
        ...


class ServerControl:
    """The weights and the memory of one server, and whether its requests run."""

    def __init__(self, server: ServerCalls, calls: Calls, base: Path, dtype: str, max_len: int) -> None:
        self._server, self._calls = server, calls
        self._dtype, self._max_len = dtype, max_len
        self._names = VersionNames()
        self.serving = Serving(base, 0, self._names.new(0))
        """The weights of the next token."""
        self.held = self.serving.name
        """The name of the loaded weights, verified or not."""
        self.judgement: Judgement | None = None
        self.broken: str | None = None
        """Why nothing can be served. Only a successful load recovers."""
        self.paused = self.frozen = False
        self.asleep: set[MemoryPart] = set()
        self.admits = asyncio.Event()
        """Set except while weights are loaded: then new requests wait."""
        self.admits.set()
        self.runs_since = 0.0
        self._trial: _Trial | None = None
        self._hollow = self._kept = False
        self._lock = asyncio.Lock()

    @property
    def changing(self) -> bool:
        """Return whether a change of weights, memory or the pause is in progress."""
        return self._lock.locked()

    def version_of(self, name: str) -> int:
        """The version of weights by their name on the server. UNAVAILABLE for a name that was not given here."""
        version = self._names.version(name)
        if version is None:
            message = f"expected weights loaded here, got {name!r}; no other client may update or restart the server"
            self.broken = message
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        return version

    async def accepted(self, name: str) -> None:
        """Wait while the weights of this name are under verification."""
        if self._trial is not None and name == self._trial.new.name:
            await self._trial.over.wait()

    async def pause(self, mode: PauseMode) -> None:
        """Refuse new requests and finish, abort or freeze those in flight."""
        if mode == "keep" and self._server.shared:
            message = "expected mode wait or abort on a server that runs share, got keep, which freezes all of them"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
        self.paused = True
        async with self._lock:
            self._kept = mode == "keep"
            await self._set_frozen(self._kept)
        if mode == "abort":
            await self.cut_short(self._calls.of(None))
        if mode != "keep":
            await self._calls.drained()

    async def resume(self) -> None:
        """Accept requests again and continue frozen ones."""
        async with self._lock:
            if self.asleep:
                raise asleep(self.asleep)
            self._kept = False
            await self._set_frozen(False)
            self.paused = False

    async def cut_short(self, calls: Sequence[Call]) -> None:
        """Abort these: each returns what the server sends at once, else what it has."""
        for call in calls:
            answers = call.sent and (self._server.answers_frozen or not self.frozen)
            call.end_within(CUT_GRACE_S if answers else 0.0)
        sent = [call for call in calls if call.sent]
        if sent:
            await self._server.cut(sent)

    async def load_weights(self, folder: Path, version: int, proof: WeightProof) -> None:
        """Load weights, all or nothing. See `Engine.load_weights`. While the KV cache sleeps, the proof is deferred."""
        async with self._lock:
            if "weights" in self.asleep:
                message = "expected the memory of the weights to be awake, got it asleep; POST /wake_up?tags=weights"
                raise TrackwayError(ErrorCode.CONFLICT, message)
            old = self._trial.old if self._trial else self.serving
            new = Serving(folder, version, self._names.new(version))
            before = await self._score_before(proof)
            self._trial = _Trial(new, old, proof, before, asyncio.Event())
            self.admits.clear()
            await self._try(self._trial, load=True)

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Release memory. See `Engine.sleep`. Frozen requests hold KV cache, so there must be none."""
        async with self._lock:
            if not self.paused or len(self._calls):
                got = f"{len(self._calls)} requests in flight" if self.paused else "one at work"
                message = f"expected a paused engine without requests, got {got}; POST /pause?mode=wait or abort first"
                raise TrackwayError(ErrorCode.CONFLICT, message)
            self._kept = False
            await self._set_frozen(False)  # requests frozen and then aborted must be able to end
            for part in parts:
                if part not in self.asleep:
                    await self._server.give_back(part)
                    self.asleep.add(part)

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Allocate memory. See `Engine.wake_up`.

        Lost weights are loaded again with the last part, unless others were loaded in between (verl's multi-stage
        wake-up: weights, load, kv_cache).
        """
        async with self._lock:
            for part in sorted(self.asleep & {*parts}, reverse=True):
                await self._server.take_again(part)
                self.asleep.discard(part)
                self._hollow |= part == "weights" and self._server.loses_weights_asleep
            if not self.asleep and self._hollow:
                await self._refill()
            if not self.asleep and self._trial:
                await self._try(self._trial, load=False)

    async def _try(self, trial: _Trial, *, load: bool) -> None:
        try:
            if load:
                await self._install(trial.new)
            if self.asleep:
                self.serving = trial.new  # no request runs before the wake-up has verified them
                return
            judgement = await self._prove(trial)
            await self._settle(trial, trial.new)
            self.judgement = judgement
        except Exception as error:
            await self._roll_back(trial, error)
            raise _corrupt(error, trial.new.folder) from error
        except asyncio.CancelledError:
            self._break(trial, f"the load of {trial.new.folder} was cancelled")
            raise

    async def _install(self, weights: Serving) -> None:
        await self._set_frozen(True)
        await self._server.swap(weights.folder, weights.name)
        self.held = weights.name
        self._hollow = False

    async def _prove(self, trial: _Trial) -> Judgement:
        digests = await self._server.digests(trial.new.folder, trial.old.folder)
        await self._set_frozen(False)
        judgement = judge(trial.proof, self._dtype, await self._scores(trial.proof), digests, trial.before)
        return require_accepted(judgement, trial.proof, trial.new.version, trial.new.folder)

    async def _score_before(self, proof: WeightProof) -> list[list[float]] | None:
        """Only if these logprobs can decide, and the server is running anyway."""
        if not any(probe.previous for probe in proof.probes):
            return None
        if self._trial or self.asleep or self._hollow or self.frozen or self.broken is not None:
            return None
        return await self._scores(proof)

    async def _scores(self, proof: WeightProof) -> list[list[float]]:
        """Logprobs of tokens 1..n-1 of each probe, truncated to the server's maximum length."""
        return [await self._server.score(probe.token_ids[: self._max_len - 1]) for probe in proof.probes]

    async def _settle(self, trial: _Trial, serving: Serving) -> None:
        """Make these the serving weights."""
        await self._set_frozen(self._kept)
        self.serving, self.broken = serving, None
        self._end(trial)

    def _end(self, trial: _Trial) -> None:
        self._trial = None
        trial.over.set()
        self.admits.set()

    async def _roll_back(self, trial: _Trial, error: Exception) -> None:
        """Load the last good weights again. If that fails, nothing may be served."""
        old = replace(trial.old, name=self._names.new(trial.old.version))
        try:
            await self._condemn(trial)
            if not old.folder.is_dir():
                raise TrackwayError(ErrorCode.ENGINE_FAILED, f"expected {old.folder}, got none: it was pruned")
            await self._install(old)
            await self._settle(trial, old)
        except Exception as second:
            self._break(trial, f"{error} Then the last good weights did not load again: {second}")
            raise TrackwayError(ErrorCode.UNAVAILABLE, str(self.broken)) from second

    async def _condemn(self, trial: _Trial) -> None:
        """Requests that ran under the unverified weights have KV of them: each ends with its earlier tokens."""
        ran = self.held == trial.new.name and not self.frozen
        met = self._calls.sent if ran else []
        for call in met:
            call.only = trial.old.name
            call.end_within(CUT_GRACE_S)
        if met:
            await self._server.cut(met)

    def _break(self, trial: _Trial, why: str) -> None:
        """The loaded weights are unknown. Only a successful load recovers."""
        self.broken = why
        for call in self._calls.sent:
            call.only = trial.old.name
            call.end_within(0.0)
        self.serving = trial.old
        self._end(trial)

    async def _refill(self) -> None:
        """Load the weights lost in sleep. They were verified before, or are being verified."""
        again = replace(self.serving, name=self._names.new(self.serving.version))
        try:
            await self._install(again)
            await self._set_frozen(self._kept)
        except Exception as error:
            self.broken = f"the weights did not load again after sleep: {error}"
            raise TrackwayError(ErrorCode.UNAVAILABLE, self.broken) from error
        self.serving, self.broken = again, None
        if self._trial:
            self._trial = replace(self._trial, new=again)

    async def _set_frozen(self, frozen: bool) -> None:
        if not self._server.shared:
            await (self._server.freeze() if frozen else self._server.thaw())
        if self.frozen and not frozen:
            self.runs_since = time.monotonic()
        self.frozen = frozen


def _corrupt(error: Exception, folder: Path) -> Exception:
    """A server's refusal of a folder means bad weights. An unreachable server says nothing about them."""
    if isinstance(error, TrackwayError) and error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.ENGINE_FAILED):
        message = f"expected weights that the server loads, got {folder}: {error.message}"
        return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)
    return error
