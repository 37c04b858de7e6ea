"""Weight updates, sleep and wake-up of an inference server; tokens of rejected weights are never returned.

During an update new requests wait and those in flight are frozen while the folder is loaded under a unique name. They
then continue, and the server's digests and its logprobs of the probes are compared with the proof. Tokens of the new
weights are held back until they are verified. If verification fails, the last good folder is loaded again, and
requests that used the rejected weights are aborted.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trackway.rollout.engines.protocol import MemoryPart
from trackway.rollout.engines.remote.requests import Call, Calls
from trackway.rollout.engines.weight_folder import check_finite
from trackway.rollout.engines.weight_proof import HeldDigests, Judgement, judge, require_accepted
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import WeightProof

_CUT_GRACE_S = 5.0
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
        """The version of a name; None for an unknown name."""
        return self._given.get(name)


@dataclass(frozen=True)
class Serving:
    """Weights loaded on a server, with their name there."""

    folder: Path
    version: int
    name: str


@dataclass(frozen=True)
class _Trial:
    """Weights under verification; `over` is set once they are accepted or rejected."""

    new: Serving
    old: Serving
    proof: WeightProof | None
    before: list[list[float]] | None
    """The server's logprobs of the probes before the load, if available."""
    over: asyncio.Event


class RemoteWeights(ABC):
    """The weights and memory of one server; backends implement the server's calls (listed in `engine.py`)."""

    loses_weights_asleep = True
    max_len: int
    """Longest prompt plus response in tokens."""
    held: str
    """The name of the loaded weights, verified or not."""

    def __init__(self, settings: RolloutSettings, calls: Calls) -> None:
        self.settings, self.calls = settings, calls
        self._names = VersionNames()
        self._serving = Serving(settings.model_path, 0, self._names.new(0))
        self.held = self._serving.name
        self._trial: _Trial | None = None
        self.judgement: Judgement | None = None
        self._broken: str | None = None
        self._asleep: set[MemoryPart] = set()
        self._hollow = self._paused = self._kept = self._frozen = False
        self._control = asyncio.Lock()
        self._admits = asyncio.Event()
        self._admits.set()
        self._runs_since = 0.0

    @property
    def version(self) -> int:
        """Weight version of the next token."""
        return self._serving.version

    @property
    def name(self) -> str:
        """The name of the serving weights."""
        return self._serving.name

    @property
    def paused(self) -> bool:
        """Whether new requests are refused."""
        return self._paused

    @property
    def asleep(self) -> frozenset[MemoryPart]:
        """Parts of the memory that are released."""
        return frozenset(self._asleep)

    @property
    def dtype(self) -> str:
        """The type of weights and activations; such a server needs a GPU, where `auto` is bfloat16."""
        if self.settings.dtype != "auto":
            return self.settings.dtype
        return "float32" if self.settings.device == "cpu" else "bfloat16"

    async def load_weights(self, folder: Path, version: int, proof: WeightProof | None) -> None:
        """Load weights, all or nothing; see `Engine.load_weights`. While the KV cache sleeps, the proof is deferred."""
        await asyncio.to_thread(check_finite, folder)
        async with self._control:
            if "weights" in self._asleep:
                message = "expected the memory of the weights to be awake, got it asleep; POST /wake_up?tags=weights"
                raise TrackwayError(ErrorCode.CONFLICT, message)
            old = self._trial.old if self._trial else self._serving
            new = Serving(folder, version, self._names.new(version))
            before = await self._score_before(proof)
            self._trial = _Trial(new, old, proof, before, asyncio.Event())
            self._admits.clear()
            await self._try(self._trial, load=True)

    async def sleep(self, parts: Sequence[MemoryPart]) -> None:
        """Release memory; see `Engine.sleep`. Frozen requests hold KV cache, so there must be none."""
        async with self._control:
            if not self._paused or len(self.calls):
                got = f"{len(self.calls)} requests in flight" if self._paused else "one at work"
                message = f"expected a paused engine without requests, got {got}; POST /pause?mode=wait or abort first"
                raise TrackwayError(ErrorCode.CONFLICT, message)
            self._kept = False
            await self._set_frozen(False)  # requests frozen and then aborted must be able to end
            for part in parts:
                if part not in self._asleep:
                    await self._give_back(part)
                    self._asleep.add(part)

    async def wake_up(self, parts: Sequence[MemoryPart]) -> None:
        """Allocate memory; see `Engine.wake_up`.

        Lost weights are loaded again with the last part, unless others were loaded in between (verl's multi-stage
        wake-up: weights, load, kv_cache).
        """
        async with self._control:
            for part in sorted(self._asleep & {*parts}, reverse=True):
                await self._take_again(part)
                self._asleep.discard(part)
                self._hollow |= part == "weights" and self.loses_weights_asleep
            if not self._asleep and self._hollow:
                await self._refill()
            if not self._asleep and self._trial:
                await self._try(self._trial, load=False)

    async def _try(self, trial: _Trial, *, load: bool) -> None:
        try:
            if load:
                await self._install(trial.new)
            if self._asleep and trial.proof is not None:
                self._serving = trial.new  # no request runs before the wake-up has verified them
                return
            judgement = await self._prove(trial, trial.proof) if trial.proof is not None else None
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
        await self._swap(weights.folder, weights.name)
        self.held = weights.name
        self._hollow = False

    async def _prove(self, trial: _Trial, proof: WeightProof) -> Judgement:
        digests = await self._digests(trial.new.folder, trial.old.folder)
        await self._set_frozen(False)
        judgement = judge(proof, self.dtype, await self._scores(proof), digests, trial.before)
        return require_accepted(judgement, proof, trial.new.version, trial.new.folder)

    async def _score_before(self, proof: WeightProof | None) -> list[list[float]] | None:
        """Only if these logprobs can decide, and the server is running anyway."""
        if proof is None or not any(probe.previous for probe in proof.probes):
            return None
        if self._trial or self._asleep or self._hollow or self._frozen or self._broken is not None:
            return None
        return await self._scores(proof)

    async def _scores(self, proof: WeightProof) -> list[list[float]]:
        """Logprobs of tokens 1..n-1 of each probe, truncated to the server's maximum length."""
        return [await self._score(probe.token_ids[: self.max_len - 1]) for probe in proof.probes]

    async def _digests(self, folder: Path, before: Path) -> HeldDigests | None:
        """Compares the server's parameters with the folder's tensors; None if it has no digests."""
        return None

    async def _settle(self, trial: _Trial, serving: Serving) -> None:
        """Make these the serving weights."""
        await self._set_frozen(self._kept)
        self._serving, self._broken = serving, None
        self._end(trial)

    def _end(self, trial: _Trial) -> None:
        self._trial = None
        trial.over.set()
        self._admits.set()

    async def _roll_back(self, trial: _Trial, error: Exception) -> None:
        """Load the last good weights again; if that fails, nothing may be served."""
        old = replace(trial.old, name=self._names.new(trial.old.version))
        try:
            await self._condemn(trial)
            if not old.folder.is_dir():
                raise TrackwayError(ErrorCode.ENGINE_FAILED, f"expected {old.folder}, got none: it was pruned")
            await self._install(old)
            await self._settle(trial, old)
        except Exception as second:
            self._break(trial, f"{error} Then the last good weights did not load again: {second}")
            raise TrackwayError(ErrorCode.UNAVAILABLE, str(self._broken)) from second

    async def _condemn(self, trial: _Trial) -> None:
        """Requests that ran under the unverified weights have KV of them: each ends with its earlier tokens."""
        ran = self.held == trial.new.name and not self._frozen
        met = self.calls.sent if ran else []
        for call in met:
            call.only = trial.old.name
            call.end_within(_CUT_GRACE_S)
        if met:
            await self._cut(met)

    def _break(self, trial: _Trial, why: str) -> None:
        """The loaded weights are unknown; only a successful load recovers."""
        self._broken = why
        for call in self.calls.sent:
            call.only = trial.old.name
            call.end_within(0.0)
        self._serving = trial.old
        self._end(trial)

    async def _refill(self) -> None:
        """Load the weights lost in sleep; they were verified before, or are being verified."""
        again = replace(self._serving, name=self._names.new(self._serving.version))
        try:
            await self._install(again)
            await self._set_frozen(self._kept)
        except Exception as error:
            self._broken = f"the weights did not load again after sleep: {error}"
            raise TrackwayError(ErrorCode.UNAVAILABLE, self._broken) from error
        self._serving, self._broken = again, None
        if self._trial:
            self._trial = replace(self._trial, new=again)

    async def _set_frozen(self, frozen: bool) -> None:
        await (self._freeze() if frozen else self._thaw())
        if self._frozen and not frozen:
            self._runs_since = time.monotonic()
        self._frozen = frozen

    @abstractmethod
    async def _freeze(self) -> None: ...

    @abstractmethod
    async def _thaw(self) -> None: ...

    @abstractmethod
    async def _swap(self, folder: Path, name: str) -> None: ...

    @abstractmethod
    async def _score(self, token_ids: Sequence[int]) -> list[float]: ...

    @abstractmethod
    async def _cut(self, calls: Sequence[Call]) -> None: ...

    @abstractmethod
    async def _give_back(self, part: MemoryPart) -> None: ...

    @abstractmethod
    async def _take_again(self, part: MemoryPart) -> None: ...


def _corrupt(error: Exception, folder: Path) -> Exception:
    """A server's refusal of a folder means bad weights; an unreachable server says nothing about them."""
    if isinstance(error, TrackwayError) and error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.ENGINE_FAILED):
        message = f"expected weights that the server loads, got {folder}: {error.message}"
        return TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)
    return error
