"""Publishing the learner's weights for the rollout replicas to pull."""

import shutil
from pathlib import Path

from trackway.clients.weights import WeightStore
from trackway.trainer.learner import Learner


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
        self._claim = store.claim(f"run {run} ({uid[:8]})")

    def publish(self) -> int:
        """Export, copy and announce; returns the version that rollouts must have from now on. Blocking."""
        self._claim.renew()
        latest = self._store.latest()
        version = 1 if latest is None else latest.version + 1
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True)
        self._learner.export(self._scratch)
        self._store.publish(version, self._run, self._scratch, self._learner.canary())
        self._store.prune(self._keep)
        return version

    def close(self) -> None:
        """Let other runs publish."""
        self._claim.close()
