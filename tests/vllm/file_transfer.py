"""vLLM's weight transfer on a machine without a GPU: its phases and its reload, with files for CUDA's memory."""

from typing import Any

import torch
from vllm.distributed.weight_transfer import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngineFactory,
)
from vllm.distributed.weight_transfer.ipc_engine import (  # pyright: ignore[reportMissingImports]
    IPCWeightTransferEngine,
)
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor  # pyright: ignore[reportMissingImports]

from tests.services.rollout.engines.remote.file_handles import opened
from tests.vllm import whole_weights  # noqa: F401  its linear layers have digests as on a GPU


class FileTransfer(IPCWeightTransferEngine):
    """The backend `ipc`, but for the two calls of CUDA. A tensor named `fails` is one that it cannot load."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As IPC's, without waiting for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """As IPC's packed updates."""
        info = update_info
        packed = opened(info.ipc_handles)[: sum(info.tensor_sizes)]
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        for name, tensor in unpack_tensor(packed, info.names, info.shapes, dtypes, info.tensor_sizes):
            if name == "fails":
                raise RuntimeError("a tensor that cannot be loaded")
            self.model.load_weights([(name, tensor.clone())])


WeightTransferEngineFactory.register_engine("file", FileTransfer)


class Registered:
    """The worker's extension, which adds nothing but this module."""
