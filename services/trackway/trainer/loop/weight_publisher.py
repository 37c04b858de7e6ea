"""Publishing the learner's weights for the rollout replicas to pull."""

import shutil
import time
from pathlib import Path

from trackway.clients.publisher_lock import PublisherLock
from trackway.clients.weights import WeightStore
from trackway.system import writing
from trackway.trainer.learner.learner import Learner
from trackway.wire.errors import TrackwayError

CLAIM_WAIT_S = 120.0
"""For the claim of this run's own last process: a file server holds the locks of a machine that died for 90 s or so."""
_ASK_AGAIN_S = 0.5


class Publisher:
    """Publishes a learner's weights as the store's next version.

    Versions are store-wide: a run, new or resumed, goes on from whatever was published last, so that no replica takes
    another run's weights for its own. One publisher at a time: raises CONFLICT while another holds the store's claim;
    `uid` tells a resumed run, which may take its own claim over, from another of the same name.
    """

    def __init__(self, store: WeightStore, learner: Learner, run: str, uid: str, scratch: Path, keep: int) -> None:
        self._store = store
        self._learner = learner
        self._run = run
        self._scratch = scratch
        self._keep = keep
        self._published: int | None = None
        self._claim = _claim(store, f"run {run} ({uid[:8]})")

    def publish(self) -> int:
        """Export, copy and announce; returns the version that rollouts must have from now on. Blocking.

        Raises StorageError, with readers at the version before and nothing left of this one, when it cannot be written.
        """
        self._claim.renew()
        latest = self._store.latest()
        version = 1 if latest is None else latest.version + 1
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            with writing(self._scratch, f"weights version {version}"):
                self._scratch.mkdir(parents=True)
                self._learner.export(self._scratch)
            proof = self._learner.proof(self._scratch, self._published)
            self._store.publish(version, self._run, self._scratch, self._learner.canary(), proof)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._published = version
        self._store.prune(self._keep)
        return version

    def close(self) -> None:
        """Let other runs publish."""
        self._claim.close()


def _claim(store: WeightStore, owner: str) -> PublisherLock:
    """Waits for one that the same run still has. Blocking."""
    end = time.monotonic() + CLAIM_WAIT_S
    while True:
        try:
            return store.claim(owner)
        except TrackwayError as error:
            if not str(error.detail.get("holder", "")).startswith(owner) or time.monotonic() > end:
                raise
        time.sleep(_ASK_AGAIN_S)
