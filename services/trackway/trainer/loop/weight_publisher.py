"""Publishing of the learner's weights: to the store, and from the learner's GPU memory by CUDA IPC.

Every version is published in the store, whatever the transport: engines prove their weights by its manifest, and load
its files when the transport fails or when they start late. So an offer that is never taken, or whose memory is gone,
costs time and nothing else.
"""

import base64
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trackway.clients import RolloutClient
from trackway.clients.publisher_lock import PublisherLock
from trackway.clients.weights import WeightStore, WholeWeights, Writers
from trackway.learner.learner import Learner
from trackway.learner.weights.sharded_files import tensors_in
from trackway.system import writing
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import OfferedTensors, SharedMemory, TransportName, UpdateMode, WeightManifest, WeightOffer

_CHUNK_BYTES = 1 << 30
"""An engine copies a chunk before it loads it, so this bounds the memory that it needs besides the weights."""
_KEY = "trackway.weights_transport=ipc"

logger = logging.getLogger("trackway.trainer")


def cuda_memory(buffer: Tensor) -> SharedMemory:
    """The export of a CUDA buffer by PyTorch (torch/multiprocessing/reductions.py), for one use by another process."""
    arguments: tuple[Any, ...] = reduce_tensor(buffer)[1]
    handle, size, offset, _, counter, counter_offset, event, event_sync = arguments[7:15]
    return SharedMemory(
        gpu=str(torch.cuda.get_device_properties(buffer.device).uuid),
        handle=base64.b64encode(handle).decode(),
        size=size,
        offset=offset,
        counter=base64.b64encode(counter).decode(),
        counter_offset=counter_offset,
        event=base64.b64encode(event).decode(),
        event_sync=event_sync,
    )


class _Chunk(NamedTuple):
    """Tensors of the buffer, as views of it by name.

    Its export serves every version: PyTorch keeps a counter and an event for each export as long as the buffer lives.
    """

    buffer: Tensor
    views: dict[str, Tensor]
    memory: SharedMemory


class IpcSender:
    """Offers a copy of the weights in the learner's GPU memory to engines on the same GPU.

    The copy is in the published type and stays allocated: memory that no engine maps would never be
    freed. `allocate` makes a buffer of so many bytes, and `share` exports it.
    """

    def __init__(
        self,
        store: WeightStore,
        learner: Learner,
        allocate: Callable[[int], Tensor],
        share: Callable[[Tensor], SharedMemory] = cuda_memory,
        chunk_bytes: int = _CHUNK_BYTES,
    ) -> None:
        self._store, self._learner = store, learner
        self._allocate, self._share, self._chunk_bytes = allocate, share, chunk_bytes
        self._chunks: list[_Chunk] | None = None
        self._failure = ""

    def withdraw(self) -> None:
        """Take back the offer before a version is made: engines must no longer take the tensors of the one before."""
        self._store.withdraw()

    def offer(self, version: int, folder: Path) -> None:
        """Offer the tensors that the folder has, before the version becomes visible. A failure is logged once."""
        try:
            self._fill(_published(folder))
            chunks = [_offered(chunk) for chunk in self._chunks or []]
            self._store.offer(WeightOffer(version=version, chunks=chunks))
        except (RuntimeError, ValueError, OSError) as error:  # CUDA's errors are RuntimeErrors
            if str(error) != self._failure:
                logger.warning("engines load weights version %d from the store: it was not offered: %s", version, error)
            self._failure = str(error)

    def _fill(self, published: Mapping[str, "_Kind"]) -> None:
        with self._learner.published() as tensors:
            want = {(name, kind.shape) for name, kind in published.items()}
            if different := sorted(want ^ {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}):
                raise ValueError(f"expected the learner to have the published tensors, got other: {different[:3]}")
            if self._chunks is None:
                self._chunks = [self._chunk(names, published) for names in self._divided(list(tensors), published)]
            for chunk in self._chunks:
                for name, view in chunk.views.items():
                    view.copy_(tensors[name])
        if self._chunks and self._chunks[0].buffer.is_cuda:
            torch.cuda.current_stream(self._chunks[0].buffer.device).synchronize()

    def _divided(self, names: Sequence[str], published: Mapping[str, "_Kind"]) -> list[list[str]]:
        parts: list[list[str]] = [[]]
        size = 0
        for name in names:
            if parts[-1] and size + published[name].bytes > self._chunk_bytes:
                parts.append([])
                size = 0
            parts[-1].append(name)
            size += published[name].bytes
        return parts

    def _chunk(self, names: Sequence[str], published: Mapping[str, "_Kind"]) -> _Chunk:
        sizes = [published[name].bytes for name in names]
        buffer = self._allocate(sum(sizes))
        parts = zip(names, buffer.split(sizes), strict=True)
        views = {name: part.view(published[name].dtype).view(published[name].shape) for name, part in parts}
        return _Chunk(buffer, views, self._share(buffer))


class _Kind(NamedTuple):
    """Type and shape of a published tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _offered(chunk: _Chunk) -> OfferedTensors:
    views = chunk.views.values()
    return OfferedTensors(
        names=list(chunk.views),
        dtype=str(next(iter(views)).dtype).removeprefix("torch."),
        shapes=[list(view.shape) for view in views],
        sizes=[view.nbytes for view in views],
        memory=chunk.memory,
    )


def _published(folder: Path) -> dict[str, _Kind]:
    """The tensors of the folder's safetensors, all of one type."""
    saved = tensors_in(sorted(folder.glob("*.safetensors")))
    kinds = {name: _Kind(tensor.properties.dtype, tuple(tensor.size)) for name, tensor in saved.items()}
    types = sorted({str(kind.dtype) for kind in kinds.values()})
    if len(types) != 1:
        raise ValueError(f"expected tensors of one type in {folder}, got {types}")
    return kinds


async def require_takers(transport: TransportName, services: ServiceUrls) -> None:
    """Raises INVALID_REQUEST if engines cannot take weights by the transport. Blocks for one request."""
    if transport == "store":
        return
    if not torch.cuda.is_available():
        raise _cannot("a learner on a GPU", "no CUDA")
    if not WeightStore(services.weights_url).is_folder:
        raise _cannot("a weight store in a folder of this machine", services.weights_url)
    if services.rollout_url is None:
        raise _cannot("a rollout service to take them", "no URL of one")
    client = RolloutClient(services.rollout_url)
    takes = (await client.weights()).transport
    if takes != transport:
        raise _cannot("a rollout service with engine: vllm and weights_transport: ipc", f"weights_transport: {takes}")
    if (replicas := len((await client.sleeping()).replicas)) > 1:
        raise _cannot("one rollout replica, on the learner's GPU", f"{replicas}")


def sender_of(name: TransportName, store: WeightStore, learner: Learner) -> IpcSender | None:
    """Return what offers versions for the transport of this name. None for the store alone."""
    if name == "store":
        return None
    device = learner.policy.device
    return IpcSender(store, learner, lambda size: torch.empty(size, dtype=torch.uint8, device=device))


def _cannot(expected: str, got: str) -> TrackwayError:
    remedy = "set that up, or leave the key out (weights_transport=store)"
    return TrackwayError(ErrorCode.INVALID_REQUEST, f"{_KEY}: expected {expected}, got {got}; {remedy}")


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
        sender: IpcSender | None = None,
    ) -> None:
        self._store = store
        self._learner = learner
        self._run = run
        self._scratch = scratch
        self._keep = keep
        self._update_mode: UpdateMode | None = update_mode
        self._anchor_every = anchor_every
        self._writers = writers
        self._sender = sender
        self._kept = scratch.with_name(f"{scratch.name}-before")
        self._last: WholeWeights | None = None
        self._since_anchor = 0
        self.published: int | None = None
        """The version that this process published last."""
        self._doing = ""
        self._claim = _claim(store, f"run {run} ({uid[:8]})")

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
        if self._sender is not None:
            self._sender.withdraw()
        shutil.rmtree(self._scratch, ignore_errors=True)
        try:
            with writing(self._scratch, f"weights version {version}"):
                self._scratch.mkdir(parents=True)
                self._doing = f"exports version {version} to {self._scratch}"
                self._learner.export_to_engines(self._scratch)
            proof = self._learner.proof(self._scratch, self.published)
            if self._sender is not None:
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
        self.published = version
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
        if self._sender is not None:
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
