"""Publication of a version by all ranks at once: each writes, digests, compares and copies the files that are its own.

Weights are divided by tensors, about as many bytes for each rank, and in every version alike, so that the changes of a
rank's file are those since its file of the version before. All other files, such as the configuration, are the first
rank's. Beside its share a rank holds one tensor at a time, while it is gathered. A model whose weights transformers
converts, as those of experts, is exported by the first rank alone, which then holds all of it (policy.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from trackway.clients.weights import WeightStore, WholeWeights, weight_files, write_changes
from trackway.system import digests
from trackway.trainer.learner.finite import not_finite, require_none
from trackway.trainer.learner.ranks.balance import balanced
from trackway.trainer.learner.ranks.sharding import Ranks, gathered_in
from trackway.trainer.learner.weights.tensor_file import write_tensors
from trackway.wire.weights import FileDigest

INDEX = "model.safetensors.index.json"
_SHARE = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors(\.delta)?")
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
    for found in ranks.of_each(lambda: {name: not_finite(tensor) for name, tensor in own.items()}):
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

    ranks.of_each(write)


def own_files(files: Iterable[Path], ranks: Ranks) -> list[Path]:
    """Those of the files that this rank publishes."""
    return [file for file in files if _owner(file.name, ranks.count) == ranks.index]


class Publishing(Protocol):
    """The method of a learner that a publication uses."""

    def publish_share(self, work: Callable[[Ranks], T]) -> list[T]:
        """What the work gives in each rank."""
        ...


class RankWriters:
    """The ranks of a learner as the processes that publish its versions."""

    def __init__(self, learner: Publishing) -> None:
        self._learner = learner

    def describe(self, folder: Path) -> list[FileDigest]:
        """As of Writers."""
        return self._together(partial(_describe, folder))

    def write_changes(
        self, folder: Path, files: Sequence[FileDigest], base: WholeWeights, scratch: Path
    ) -> list[FileDigest]:
        """As of Writers."""
        return self._together(partial(_write_changes, folder, files, base, scratch))

    def copy(self, store: WeightStore, version: int, folder: Path, names: Sequence[str]) -> None:
        """As of Writers."""
        self._learner.publish_share(partial(_copy, store.url, version, folder, names))

    def _together(self, work: Callable[[Ranks], list[FileDigest]]) -> list[FileDigest]:
        return sorted(chain(*self._learner.publish_share(work)), key=lambda file: file.name)


def _describe(folder: Path, ranks: Ranks) -> list[FileDigest]:
    return digests(folder, own_files(weight_files(folder), ranks))


def _write_changes(
    folder: Path, files: Sequence[FileDigest], base: WholeWeights, scratch: Path, ranks: Ranks
) -> list[FileDigest]:
    own = [file for file in files if _owner(file.name, ranks.count) == ranks.index]
    return write_changes(folder, own, base, scratch)


def _copy(url: str, version: int, folder: Path, names: Sequence[str], ranks: Ranks) -> None:
    WeightStore(url).put(version, folder, [name for name in names if _owner(name, ranks.count) == ranks.index])


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
