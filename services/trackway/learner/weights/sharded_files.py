"""Tensors in safetensors files, one of each rank that writes, through PyTorch's distributed checkpoint (DCP).

DCP divides tensors over the ranks that write, and reads any part of them, so a checkpoint goes on with any number of
ranks. A set of tensors `model` is `model.safetensors` from one process, and `model-00001-of-00004.safetensors` and so
on from four (docs/decisions/0012). The offsets of shards are in the header, as with DCP's own
HuggingFaceStorageWriter.

`write_tensors` writes one tensor after another, so that they need not exist in memory together. The format
(https://github.com/huggingface/safetensors): the length of the header in 8 bytes, the header as JSON with the place of
each tensor, then their bytes. As in the library's own files, larger types come first, so that each tensor is aligned.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from trackway.learner.ranks.launch import RankError

_TYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(_TYPES)
DTYPES = {name: dtype for dtype, name in _TYPES.items()}
"""Types by their names in a header."""
SHARDS, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Names in the header's metadata, as PyTorch's HuggingFaceStorageWriter has them."""


def in_file_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of their bytes in a file."""
    return dict(sorted(tensors.items(), key=lambda item: (_ORDER.index(item[1].dtype), item[0])))


def write_tensors(
    file: Path,
    like: Mapping[str, Tensor],
    complete: Iterable[Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
    *,
    metadata: Mapping[str, str] | None = None,
    durable: bool = True,
) -> None:
    """Writes the tensors that `complete` yields, of the names, types and shapes of `like`, both in file order.

    `offsets` are the places of shards in the tensors that they are parts of. None for whole tensors. `metadata` is the
    header's. A `durable` file is on disk when this returns.
    """
    header: dict[str, Mapping[str, object]] = {} if metadata is None else {"__metadata__": metadata}
    if offsets is not None:
        places = {name: {OFFSETS: list(place)} for name, place in offsets.items()}
        header["__metadata__"] = {"format": "pt", SHARDS: json.dumps(places)}
    end = 0
    for name, tensor in like.items():
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        for tensor in complete:
            output.write(tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if durable:
            output.flush()
            os.fsync(output.fileno())


SUFFIX = ".safetensors"


def write_shards(stem: Path, tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> None:
    """Writes what this rank holds of the tensors to the files of `stem`. A tensor that is not sharded is the first's.

    A collective of the group, or None for one process. An OSError of any rank is raised in all of them, any other
    error as a RankError by its name.
    """
    planner = DefaultSavePlanner(
        flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True
    )
    writer = _Writer(stem)
    if group is None:
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        plans, _ = planner.create_global_plan([planner.create_local_plan()])
        writer.write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
        return
    try:
        state_dict_saver.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        if isinstance(failure, OSError):
            raise failure from None
        named = f"{type(failure).__name__}: {failure}"
        raise RankError(f"rank {rank} of the learner could not write its share of {stem}: {named}") from failure


def read_shards(stem: Path, targets: Mapping[str, Tensor]) -> None:
    """Reads the parts of the saved tensors that this rank's targets hold, into them. Not a collective."""
    read_files(_existing(stem), targets)


def read_files(files: Sequence[Path], targets: Mapping[str, Tensor]) -> None:
    """Do `read_shards` on these safetensors files. Memory holds only the copied parts of each tensor."""
    reader, planner = _Reader(files), DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(dict(targets), metadata, is_coordinator=True)
    plans = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plans[0]), planner)


def read_whole(stem: Path) -> dict[str, Tensor]:
    """The saved tensors, whole."""
    saved = saved_tensors(stem)
    tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in saved.items()}
    read_shards(stem, tensors)
    return tensors


def saved_tensors(stem: Path) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of the saved tensors. Raises FileNotFoundError without a file."""
    return tensors_in(_existing(stem))


def tensors_in(files: Sequence[Path]) -> dict[str, TensorStorageMetadata]:
    """Shapes and types of the tensors in these safetensors files."""
    return cast(dict[str, TensorStorageMetadata], _Reader(files).read_metadata().state_dict_metadata)


def is_saved(stem: Path) -> bool:
    """Return whether there is a file of `stem`."""
    return bool(_files(stem))


def _files(stem: Path) -> list[Path]:
    whole = stem.with_name(stem.name + SUFFIX)
    return [whole] if whole.exists() else sorted(stem.parent.glob(f"{stem.name}-?????-of-?????{SUFFIX}"))


def _existing(stem: Path) -> list[Path]:
    files = _files(stem)
    if not files:
        raise FileNotFoundError(f"expected {stem.name}{SUFFIX} or its shards in {stem.parent}, got none")
    return files


@dataclass(frozen=True)
class _Share:
    """The rank that writes, and the number of ranks."""

    index: int
    count: int

    def file(self, stem: Path) -> Path:
        number = "" if self.count == 1 else f"-{self.index + 1:05d}-of-{self.count:05d}"
        return stem.with_name(stem.name + number + SUFFIX)


class _Writer(StorageWriter):
    def __init__(self, stem: Path) -> None:
        self._stem = stem

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=_Share(index, len(plans))) for index, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        share: _Share = plan.storage_data
        offsets: dict[str, torch.Size] = {}
        tensors: dict[str, Tensor] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            tensor = cast(Tensor, planner.resolve_data(item)).detach()
            assert item.tensor_data is not None
            if tensor.numel():  # a tensor may have fewer rows than there are ranks
                offsets[item.index.fqn], tensors[item.index.fqn] = item.tensor_data.chunk.offsets, tensor
            results.append(WriteResult(item.index, tensor.nbytes, None))
        # The first rank writes a file even without tensors, as those of an optimizer before its first step.
        if tensors or share.index == 0:
            self._stem.parent.mkdir(parents=True, exist_ok=True)
            tensors = in_file_order(tensors)
            write_tensors(share.file(self._stem), tensors, tensors.values(), None if share.count == 1 else offsets)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True


class _Reader(StorageReader):
    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._places: dict[MetadataIndex, Path] = {}

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, Path] = {}
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                shards = json.loads((file.metadata() or {}).get(SHARDS, "{}"))
                for name in file.keys():  # noqa: SIM118  # it is no mapping
                    part = file.get_slice(name)
                    shape = part.get_shape()
                    offsets = torch.Size(shards[name][OFFSETS] if name in shards else [0] * len(shape))
                    end = torch.Size(map(int.__add__, offsets, shape))
                    known = tensors.get(name)
                    if known is None:
                        properties = TensorProperties(dtype=DTYPES[part.get_dtype()])
                        known = tensors[name] = TensorStorageMetadata(properties, end, [])
                    known.size = torch.Size(map(max, known.size, end))
                    known.chunks.append(ChunkStorageMetadata(offsets, torch.Size(shape)))
                    places[MetadataIndex(name, offsets)] = path
        return Metadata(tensors, storage_data=places)  # pyright: ignore[reportArgumentType]  # a dict is invariant

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            start, size = item.storage_offsets, item.lengths
            # Opened for each tensor: what has been read of an open file stays in memory, as it is mapped.
            with safe_open(self._places[item.storage_index], framework="pt") as file:
                if size:
                    part = file.get_slice(item.storage_index.fqn)
                    target.copy_(part[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))])
                else:
                    target.copy_(file.get_tensor(item.storage_index.fqn))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        return True
