"""Values that the ranks of a learner send one another, as JSON of a given type.

torch's object collectives unpickle what they receive, so a process that reaches a rank's port could run code in it.
"""

from typing import TypeVar, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from trackway.learner.ranks.launch import RankError

MOST_BYTES = 16 << 30
"""Most bytes of a value: some 500 million tokens of trajectories."""
NOTHING = TypeAdapter(None)
T = TypeVar("T")


def broadcast(adapter: TypeAdapter[T], value: T | None = None, group: ProcessGroup | None = None) -> T:
    """Return the first rank's `value`, which other ranks leave out. A collective on the CPU.

    Raises RankError for a value that is too large, and ValidationError for one of another type.
    """
    is_first = distributed.get_rank() == 0
    buffer = bytearray(adapter.dump_json(cast(T, value))) if is_first else bytearray()
    size = torch.tensor(len(buffer))
    distributed.broadcast(size, src=0, group=group)
    buffer = buffer.ljust(_bounded(size))
    distributed.broadcast(_tensor(buffer), src=0, group=group)
    return cast(T, value) if is_first else adapter.validate_json(buffer)


def gather(adapter: TypeAdapter[T], value: T) -> list[T]:
    """Return the value of each rank. A collective on the CPU. Raises as `broadcast`."""
    sent, count = bytearray(adapter.dump_json(value)), distributed.get_world_size()
    sizes = [torch.tensor(0) for _ in range(count)]
    distributed.all_gather(sizes, torch.tensor(len(sent)))
    longest = max(map(_bounded, sizes))
    received = [bytearray(longest) for _ in range(count)]
    distributed.all_gather([_tensor(buffer) for buffer in received], _tensor(sent.ljust(longest)))
    return [adapter.validate_json(buffer) for buffer in received]


def _tensor(buffer: bytearray) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _bounded(size: Tensor) -> int:
    if not 0 < size <= MOST_BYTES:
        raise RankError(
            f"expected a message of 1 to {MOST_BYTES} bytes between ranks of the learner, got {int(size)}; lower "
            "data.train_batch_size or data.max_response_length"
        )
    return int(size)
