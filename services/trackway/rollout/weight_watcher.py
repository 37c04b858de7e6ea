"""Follows the weight store: polls, fetches, verifies and loads new versions; requests can wait for a version.

A replica generates only after it has read the store, so a late or restarted one never serves old weights. Files are
fetched, assembled from deltas and verified while requests run. If a version does not load (corrupt, or proof failed),
the old one stays, the failure is logged once, and loading is retried. A replica whose weights are older than the
newest ones that are published whole takes these meanwhile.
`update_mode` decides about requests in flight: `keep` loads while they run, `wait` and `abort` hold new requests back
while those in flight finish or are aborted. A version whose run wants a mode is loaded in that one.
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from trackway.clients.weights import CACHE_LOCK, WeightStore, version_of
from trackway.rollout.engines.protocol import Engine, PauseMode
from trackway.system import LockTaken, locked
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready
from trackway.wire.weights import UpdateMode, WeightManifest

_log = logging.getLogger(__name__)
_SLOWEST_RETRY_S = 5.0
DRAIN_S = 300.0
"""With `update_mode` wait: requests that need longer than this are aborted, and the agent resumes them."""


class WeightWatcher:
    """Keeps an engine at the newest version of a store, or at version 0 without a store."""

    def __init__(
        self,
        engine: Engine,
        store: WeightStore | None,
        cache: Path,
        interval_s: float,
        wait_s: float,
        update_mode: UpdateMode = "keep",
    ) -> None:
        self._engine, self._store, self._cache = engine, store, cache
        self._interval_s, self._wait_s = interval_s, wait_s
        self._update_mode: UpdateMode = update_mode
        self.updates = 0
        """Number of swaps started. A request aborted while it grew was aborted by an update."""
        self.control = asyncio.Lock()
        """Held to pause or resume the engine and to swap its weights, but not while they are fetched or read."""
        self._gate = asyncio.Event()
        self._gate.set()
        self._latest = 0
        self.is_dropped = False
        """True if the store has no version any more."""
        self._synced = store is None
        self._error: str | None = None
        self._refused: tuple[WeightManifest, TrackwayError] | None = None
        """Version that the engine rejected although its digests are right: retrying would only disturb requests."""
        self._loaded = asyncio.Condition()
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def latest(self) -> int:
        """The newest version seen in the store, loaded or not."""
        return max(self._latest, self._engine.version)

    async def start(self) -> None:
        """Load the latest version, then keep watching in the background, which retries failures."""
        if self._store is not None:
            await self._try_sync(self._store)
            self._task = asyncio.create_task(self._watch(self._store), name="weight-watcher")

    async def stop(self) -> None:
        """End watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def ready(self) -> Ready:
        """Ready once the store was read and its latest version loaded, unless an update holds requests back."""
        if self._synced and self._gate.is_set():
            return Ready(ready=True)
        if self._synced:
            return Ready(ready=False, reason=f"weights version {self._latest} is being loaded")
        return Ready(ready=False, reason=f"weights are not loaded yet: {self._error or 'the store was not read yet'}")

    async def gate(self) -> None:
        """Wait until no update holds requests back. Raises PAUSED after the time limit."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._gate.wait()
        except TimeoutError:
            message = f"weights version {self._latest} is still being loaded after {self._wait_s} s; retry later"
            raise TrackwayError(ErrorCode.PAUSED, message) from None

    def behind(self, want: int) -> bool:
        """Return whether a request for `want` would have to wait."""
        return self._engine.version < want

    async def catch_up(self, want: int, within_s: float | None = None) -> None:
        """Wait until the engine has version `want` or newer.

        Raises UNAVAILABLE before the first load, WEIGHTS_BEHIND after the time limit (at once without a store), and at
        once the engine's error when it has refused the newest version.
        """
        wait_s = self._wait_s if within_s is None else within_s
        if not self._synced:
            raise TrackwayError(ErrorCode.UNAVAILABLE, f"{self.ready().reason}; retry later")
        if not self.behind(want):
            return
        self._look_now.set()
        try:
            async with asyncio.timeout(wait_s if self._store else 0), self._loaded:
                await self._loaded.wait_for(lambda: not self.behind(want) or self._refusal(want) is not None)
        except TimeoutError:
            raise self._too_late(want, wait_s) from None
        if self.behind(want) and (refusal := self._refusal(want)) is not None:
            raise refusal

    def _refusal(self, want: int) -> TrackwayError | None:
        """Why the engine refused the newest version. None unless a request for `want` must wait for that one."""
        if self._refused is None or not want <= self._refused[0].version == self._latest:
            return None
        return self._refused[1]

    async def _watch(self, store: WeightStore) -> None:
        delay = self._interval_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._look_now.wait()
            self._look_now.clear()
            fine = await self._try_sync(store)
            delay = self._interval_s if fine else min(2 * delay, _SLOWEST_RETRY_S)

    async def _try_sync(self, store: WeightStore) -> bool:
        try:
            await self._sync(store)
        except Exception as error:
            # On any error of the store (network, file system, our own) the replica keeps its weights.
            if str(error) != self._error:
                _log.error("weights stay at version %d: %s: %s", self._engine.version, type(error).__name__, error)
            self._error = str(error)
            return False
        self._error = None
        return True

    async def _sync(self, store: WeightStore) -> None:
        manifest = await asyncio.to_thread(store.latest)
        self.is_dropped = manifest is None and self._latest > 0
        if manifest is not None:
            self._latest = manifest.version
            if manifest.version > self._engine.version and "weights" not in self._engine.asleep:
                await self._load_newest(store, manifest.version)
        self._synced = True

    async def _load_newest(self, store: WeightStore, version: int) -> None:
        """Load the version. If it is an incomplete delta, the newest version published whole, and raise."""
        try:
            folder = await asyncio.to_thread(store.fetch, version, self._cache)
        except TrackwayError as error:
            anchor = await asyncio.to_thread(store.anchor_before, version)
            if anchor is None or anchor <= self._engine.version:
                raise
            store.fallbacks += 1
            _log.warning("weights version %d is loaded in place of %d: %s", anchor, version, error)
            await self._load(store, anchor, await asyncio.to_thread(store.fetch, anchor, self._cache))
            self._synced = True
            raise
        await self._load(store, version, folder)

    async def _load(self, store: WeightStore, version: int, folder: Path) -> None:
        manifest = await asyncio.to_thread(store.manifest, version)
        if self._refused is not None and self._refused[0] == manifest:
            raise self._refused[1]
        mode = manifest.update_mode or self._update_mode
        try:
            await self._engine.load_weights(folder, version, manifest.proof, lambda: self._swapping(mode))
        except TrackwayError as error:
            if error.code in (ErrorCode.WEIGHTS_CORRUPT, ErrorCode.WEIGHTS_STALE):
                self._refused = manifest, error
                async with self._loaded:
                    self._loaded.notify_all()
            raise
        await asyncio.to_thread(self._tidy, version)
        judgement = self._engine.judgement
        verdict = "no verdict yet" if judgement is None else judgement.summary()
        _log.info("weights version %d of run %s loaded: %s", version, manifest.run, verdict)
        async with self._loaded:
            self._loaded.notify_all()

    def _tidy(self, loaded: int) -> None:
        """Delete copies of versions before this one, except the newest two.

        An engine may return to one of them, and another replica of this host may be a version behind.
        """
        if not self._cache.is_dir():
            return
        with contextlib.suppress(LockTaken), locked(self._cache / CACHE_LOCK):
            numbered = {folder: version_of(folder) for folder in self._cache.iterdir()}
            older = [folder for folder, version in numbered.items() if version is not None and version < loaded]
            whole = sorted((folder for folder in older if folder.name.isdecimal()), key=lambda folder: int(folder.name))
            for old in {*older} - {*whole[-2:]}:
                shutil.rmtree(old, ignore_errors=True)

    @contextlib.asynccontextmanager
    async def _swapping(self, mode: UpdateMode) -> AsyncIterator[None]:
        async with self.control, self._held(mode):
            self.updates += 1
            yield

    @contextlib.asynccontextmanager
    async def _held(self, mode: UpdateMode) -> AsyncIterator[None]:
        """Finish or abort requests and hold new ones back, unless they may keep running or the engine is paused."""
        if mode == "keep" or self._engine.paused:
            yield
            return
        self._gate.clear()
        self.updates += 1
        try:
            await self._pause(mode)
            yield
        finally:
            await self._engine.resume()
            self._gate.set()

    async def _pause(self, mode: PauseMode) -> None:
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._engine.pause(mode)
        except TimeoutError:
            _log.warning("aborting requests for an update: some did not finish within %.0f s", DRAIN_S)
            await self._engine.pause("abort")

    def _too_late(self, want: int, wait_s: float) -> TrackwayError:
        have, reason = self._engine.version, self._error or f"the newest version published is {self._latest}"
        return TrackwayError(
            ErrorCode.WEIGHTS_BEHIND,
            f"expected weights version {want} within {round(wait_s, 2)} s, got {have}: {reason}; retry later",
            have=have,
            want=want,
        )
