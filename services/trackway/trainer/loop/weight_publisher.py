"""Publishing the learner's weights for the rollout replicas to pull."""

import shutil
import time
from pathlib import Path

from trackway.clients.publisher_lock import PublisherLock
from trackway.clients.weights import WeightStore, WholeWeights, Writers
from trackway.learner.learner import Learner
from trackway.system import writing
from trackway.trainer.loop.weight_transport import StoreSender, WeightSender
from trackway.wire.errors import TrackwayError
from trackway.wire.weights import UpdateMode, WeightManifest

CLAIM_WAIT_S = 120.0
"""Wait for the lock of this run's last process: a file server keeps the locks of a dead machine for about 90 s."""
_RETRY_S = 0.5


class Publisher:
    """Publishes a learner's weights as the store's next version.

    Versions are numbered across the store: every run continues from the last published version, so that a replica
    cannot mistake another run's weights for its own. Raises CONFLICT while another publisher holds the store's lock.
    `uid` distinguishes a resumed run, which may take over its own lock, from another run of the same name.
    `update_mode` is what the run wants for requests in flight when a version is loaded. Of `anchor_every` versions one
    is published whole, the first of a process among them. The others are deltas against the version before, of which
    the files are kept beside `scratch` for that. 0 publishes all whole. `writers` copy the files. Without them this
    process does. A `sender` may bring engines the tensors another way too.
    """

    def __init__(
        self,
        store: WeightStore,
        learner: Learner,
        run: str,
        uid: str,
        scratch: Path,
        keep: int,
        update_mode: UpdateMode | None = None,
        anchor_every: int = 0,
        writers: Writers | None = None,
        sender: WeightSender | None = None,
    ) -> None:
        self._store = store
        self._learner = learner
        self._run = run
        self._scratch = scratch
        self._keep = keep
        self._update_mode: UpdateMode | None = update_mode
        self._anchor_every = anchor_every
        self._writers = writers
        self._sender = sender or StoreSender()
        self._kept = scratch.with_name(f"{scratch.name}-before")
        self._last: WholeWeights | None = None
        self._since_anchor = 0
        self._published: int | None = None
        self._doing = ""
        self._claim = _claim(store, f"run {run} ({uid[:8]})")

    @property
    def published(self) -> int | None:
        """The version that this process published last."""
        return self._published

    def progress(self) -> str:
        """Present work of `publish`."""
        return self._doing

    def newest(self) -> int | None:
        """The newest version in the store, of this run or another; None in an empty one. Blocking."""
        latest = self._store.latest()
        return None if latest is None else latest.version

    def publish(self) -> int:
        """Export, copy and announce. Returns the version that rollouts must use from now on. Blocking.

        Raises StorageError when it cannot be written. Readers stay at the previous version and no file is left.
        """
        self._doing = f"asks the weight store {self._store.url}"
        self._claim.renew()
        version = (self.newest() or 0) + 1
        self._sender.withdraw()
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            with writing(self._scratch, f"weights version {version}"):
                self._scratch.mkdir(parents=True)
                self._doing = f"exports version {version} to {self._scratch}"
                self._learner.export_to_engines(self._scratch)
            proof = self._learner.proof(self._scratch, self._published)
            self._sender.offer(version, self._scratch)
            self._doing = f"copies version {version} to the weight store {self._store.url}"
            manifest = self._store.publish(
                version,
                self._run,
                self._scratch,
                proof,
                self._update_mode,
                self._base(version),
                self._writers,
            )
            self._keep_files(manifest)
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._published = version
        self._store.prune(self._keep)
        return version

    def _base(self, version: int) -> WholeWeights | None:
        """Version that this one is a delta of, or None for an anchor, also after a version of another run."""
        if self._last is None or self._since_anchor + 1 >= self._anchor_every:
            return None
        return self._last if self._last.manifest.version == version - 1 else None

    def _keep_files(self, manifest: WeightManifest) -> None:
        """Keeps the files of a published version for the delta of the next one."""
        if not self._anchor_every:
            return
        shutil.rmtree(self._kept, ignore_errors=True)
        self._scratch.rename(self._kept)
        self._last = WholeWeights(manifest, self._kept)
        self._since_anchor = 0 if manifest.delta is None else self._since_anchor + 1

    def close(self) -> None:
        """Let other runs publish."""
        self._sender.withdraw()
        shutil.rmtree(self._kept, ignore_errors=True)
        self._claim.close()


def _claim(store: WeightStore, owner: str) -> PublisherLock:
    """The store's lock. Waits while an earlier process of the same run holds it. Blocking."""
    end = time.monotonic() + CLAIM_WAIT_S
    while True:
        try:
            return store.claim(owner)
        except TrackwayError as error:
            if not str(error.detail.get("holder", "")).startswith(owner) or time.monotonic() > end:
                raise
        time.sleep(_RETRY_S)
