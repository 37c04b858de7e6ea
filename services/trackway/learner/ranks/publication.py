"""Publication of a version by all ranks at once: each writes, digests, compares and copies the files that are its own.

Weights are divided by tensors, about as many bytes for each rank, and in every version alike, so that the changes of a
rank's file are those since its file of the version before. All other files, such as the configuration, are the first
rank's. Beside its share a rank holds one tensor at a time, while it is gathered. A model whose weights transformers
converts, as those of experts, is exported by the first rank alone, which then holds all of it (policy.py).
"""

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from pydantic import BaseModel, Field, TypeAdapter
from torch import Tensor

from trackway.clients.weights import WeightStore, WholeWeights, weight_files, write_changes
from trackway.learner.finite import not_finite, require_none
from trackway.learner.ranks.balance import balanced
from trackway.learner.ranks.messages import NOTHING
from trackway.learner.ranks.sharding import Ranks, gathered_in
from trackway.learner.weights.sharded_files import write_tensors
from trackway.system import digests
from trackway.wire.weights import FileDigest

INDEX = "model.safetensors.index.json"
_SHARE = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors(\.delta)?")
_COUNTS, _FILES = TypeAdapter(dict[str, int]), TypeAdapter(list[FileDigest])
T = TypeVar("T")


def export_shares(folder: Path, state: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype) -> None:
    """Writes the weights as safetensors of each rank, with transformers' index of them. A collective.

    Raises NotFiniteError, with nothing written, when a weight is NaN or infinite in that type.
    """
    owners = _owners(state, ranks.count)
    own: dict[str, Tensor] = {}
    for name, owner in owners.items():
        complete = gathered_in(owner, state[name], ranks, dtype)
        if complete is not None:
            own[name] = complete
    counts: dict[str, int] = {}
    for found in ranks.of_each(lambda: {name: not_finite(tensor) for name, tensor in own.items()}, _COUNTS):
        counts |= found
    require_none(state, [counts[name] for name in state])

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if own:  # a model may have fewer tensors than there are ranks
            file = folder / _share_name(ranks.index, ranks.count)
            write_tensors(file, own, own.values(), metadata={"format": "pt"}, durable=False)
        if ranks.is_first:
            names = {name: _share_name(owner, ranks.count) for name, owner in owners.items()}
            total = sum(tensor.numel() for tensor in state.values()) * dtype.itemsize
            index = {"metadata": {"total_size": total}, "weight_map": names}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    ranks.of_each(write, NOTHING)


def own_files(files: Iterable[Path], ranks: Ranks) -> list[Path]:
    """Files that this rank publishes."""
    return [file for file in files if _owner(file.name, ranks.count) == ranks.index]


class Work(BaseModel, ABC, Generic[T]):
    """A part of a publication that each rank does."""

    result: ClassVar[TypeAdapter[Any]]

    @abstractmethod
    def run(self, ranks: Ranks) -> T:
        """Do this rank's part."""


class Describe(Work[list[FileDigest]]):
    """Digests the files of a folder."""

    kind: Literal["describe"] = "describe"
    folder: Path
    result = _FILES

    def run(self, ranks: Ranks) -> list[FileDigest]:
        """Implement `Work.run`."""
        return digests(self.folder, own_files(weight_files(self.folder), ranks))


class WriteChanges(Work[list[FileDigest]]):
    """Writes the changes of files since another version."""

    kind: Literal["write_changes"] = "write_changes"
    folder: Path
    files: list[FileDigest]
    base: WholeWeights
    scratch: Path
    result = _FILES

    def run(self, ranks: Ranks) -> list[FileDigest]:
        """Implement `Work.run`."""
        own = [file for file in self.files if _owner(file.name, ranks.count) == ranks.index]
        return write_changes(self.folder, own, self.base, self.scratch)


class Copy(Work[None]):
    """Copies files of a folder to a version in the store."""

    kind: Literal["copy"] = "copy"
    url: str
    version: int
    folder: Path
    names: list[str]
    result = NOTHING

    def run(self, ranks: Ranks) -> None:
        """Implement `Work.run`."""
        own = [name for name in self.names if _owner(name, ranks.count) == ranks.index]
        WeightStore(self.url).put(self.version, self.folder, own)


class LookFor(Work[bool]):
    """Waits until a file is there."""

    kind: Literal["look_for"] = "look_for"
    file: Path
    deadline_s: float
    result = TypeAdapter(bool)

    def run(self, ranks: Ranks) -> bool:
        """Return whether it is there by the deadline."""
        end = time.monotonic() + self.deadline_s
        while not (found := self.file.exists()) and time.monotonic() < end:
            time.sleep(0.05)
        return found


AnyWork = Annotated[Describe | WriteChanges | Copy | LookFor, Field(discriminator="kind")]
"""Work that a rank accepts from another one."""


class Publishing(Protocol):
    """The method of a learner that a publication uses."""

    def publish_share(self, work: Work[T]) -> list[T]:
        """Return the work's result in each rank."""
        ...


class RankWriters:
    """The ranks of a learner as the processes that publish its versions."""

    def __init__(self, learner: Publishing) -> None:
        self._learner = learner

    def describe(self, folder: Path) -> list[FileDigest]:
        """Implement `Writers.describe`."""
        return self._together(Describe(folder=folder))

    def write_changes(
        self, folder: Path, files: Sequence[FileDigest], base: WholeWeights, scratch: Path
    ) -> list[FileDigest]:
        """Implement `Writers.write_changes`."""
        return self._together(WriteChanges(folder=folder, files=list(files), base=base, scratch=scratch))

    def copy(self, store: WeightStore, version: int, folder: Path, names: Sequence[str]) -> None:
        """Implement `Writers.copy`."""
        self._learner.publish_share(Copy(url=store.url, version=version, folder=folder, names=list(names)))

    def _together(self, work: Work[list[FileDigest]]) -> list[FileDigest]:
        return sorted(chain(*self._learner.publish_share(work)), key=lambda file: file.name)


def _owners(state: Mapping[str, Tensor], count: int) -> dict[str, int]:
    """The rank that publishes each tensor, by name."""
    names = sorted(state)
    parts = balanced([state[name].numel() for name in names], count)
    owner_of = {row: rank for rank, rows in enumerate(parts) for row in rows}
    return {name: owner_of[row] for row, name in enumerate(names)}


def _share_name(rank: int, count: int) -> str:
    return f"model-{rank + 1:05d}-of-{count:05d}.safetensors"


def _owner(file: str, count: int) -> int:
    share = _SHARE.fullmatch(file)
    return int(share[1]) - 1 if share is not None and int(share[2]) == count else 0
