"""How the tensors of a version get into a vLLM server: from the store's folder, or from the learner's GPU memory.

The learner's offer (`offer.json` in the weight store) names buffers that it exported by CUDA IPC. They go to vLLM
through the phases of its weight transfer (vllm/entrypoints/rl/online/api_router.py of 0.32): init, start, one update
for each buffer, finish. After any failure the server is brought back to a state from which a folder loads, and takes
the version from there, also if the proof refuses what was transferred.
"""

import asyncio
import base64
import contextlib
import logging
import pickle
from collections.abc import Callable

import torch

from trackway.clients.weights import WeightStore
from trackway.rollout.engines.remote.server import EngineHttp, Json
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import OfferedTensors, WeightOffer

_PHASE_S = 120.0
_log = logging.getLogger(__name__)


class IpcReceiver:
    """Buffers in the learner's GPU memory, on the GPU of a server without tensor parallelism."""

    def __init__(self, http: Callable[[], EngineHttp], store: WeightStore) -> None:
        self._http, self._store = http, store
        self.loads = 0
        """Versions that were transferred."""
        self.fallbacks = 0
        """Versions that were offered and then read from the store."""
        self._loaded: int | None = None
        self._given_up: int | None = None
        self._said = ""

    async def load(self, version: int) -> bool:
        """Replace the server's whole weights while its requests are frozen.

        Returns False when it did not, and the server can take the version from its folder.
        """
        offer = await asyncio.to_thread(self._store.offered)
        if offer is None or offer.version != version or version == self._given_up:
            return False
        try:
            await self._transfer(offer)
            if await asyncio.to_thread(self._store.offered) != offer:
                message = "expected the offer to stand until the weights were loaded, got it withdrawn"
                raise TrackwayError(ErrorCode.WEIGHTS_CORRUPT, message)
        except TrackwayError as error:
            self.give_up(version, error)
            return False
        self.loads += 1
        self._loaded = version
        return True

    def was_used(self, version: int) -> bool:
        """Return whether the version was transferred, so that the store is still to be tried."""
        return self._loaded == version != self._given_up

    def give_up(self, version: int, error: TrackwayError) -> None:
        """Take this version from the store. The same reason is logged once."""
        self.fallbacks += 1
        self._given_up = version
        if error.message != self._said:
            _log.warning("weights version %d is loaded from the store, not from the learner: %s", version, error)
        self._said = error.message

    async def _transfer(self, offer: WeightOffer) -> None:
        http = self._http()
        await http.post("/init_weight_transfer_engine", {"init_info": {"packed": True}}, timeout_s=_PHASE_S)
        try:
            await http.post("/start_weight_update", timeout_s=_PHASE_S)
            for chunk in offer.chunks:
                await http.post("/update_weights", {"update_info": update_info(chunk)}, timeout_s=_PHASE_S)
            await http.post("/finish_weight_update", timeout_s=_PHASE_S)
        except TrackwayError:
            await _end_update(http)
            raise


async def _end_update(http: EngineHttp) -> None:
    """Ends a failed update, whose half-loaded layers would count towards the next one.

    vLLM forgets the update that failed, but not its layers: a finish puts these back and needs a start before it. A
    server that answered with an error may have closed the connection, so each is tried on another one too.
    """
    for phase in ("/start_weight_update", "/finish_weight_update"):
        with contextlib.suppress(TrackwayError):
            await http.post(phase, timeout_s=_PHASE_S, idempotent=True)


def update_info(chunk: OfferedTensors) -> Json:
    """The body of vLLM's update for its backend `ipc`, which takes PyTorch's export as a pickle."""
    memory = chunk.memory
    arguments = (
        *(torch.Tensor, torch.Size([memory.size]), (1,), 0),
        *(torch.storage.TypedStorage, torch.uint8, 0),  # the server puts its own device here
        *(base64.b64decode(memory.handle), memory.size, memory.offset, False),
        *(base64.b64decode(memory.counter), memory.counter_offset),
        *(base64.b64decode(memory.event), memory.event_sync),
    )
    return {
        "names": chunk.names,
        "dtype_names": [chunk.dtype] * len(chunk.names),
        "shapes": chunk.shapes,
        "tensor_sizes": chunk.sizes,
        "ipc_handles_pickled": base64.b64encode(pickle.dumps({memory.gpu: arguments})).decode(),
    }
