"""The ranks of a learner: processes that each hold a shard of its weights and compute a share of each mini-batch.

Every rank runs the same code on the same trajectories and makes the same collective calls in the same order. Only the
rows of its micro-batches differ (balance.py). So batches, advantages and metrics are the same on every rank, and what
a rank computed of its own rows is added up over them. Weights, gradients and AdamW's moments are sharded by PyTorch's
FSDP2 (`fully_shard`); each forward gathers the weights of one layer at a time. One process is one rank without a mesh:
nothing is sharded, and nothing is sent.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple, Self, TypeVar, cast

import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from trackway.learner.finite import not_finite, require_none
from trackway.learner.ranks.messages import gather
from trackway.learner.ranks.sequence_parallel import SequenceRanks
from trackway.run_config.placement import Placement

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""PyTorch's communication backends by the learner's device. Values of the CPU are summed on every device."""
WRITE_S = 3600.0
"""Longest wait of a rank for another one to write its share of a checkpoint."""
T = TypeVar("T")


class Ranks:
    """The ranks of one learner as one of them sees them. Without a mesh, one process."""

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        timeout: timedelta | None = None,
        sequences: SequenceRanks | None = None,
        writers: ProcessGroup | None = None,
        per_node: int = 1,
    ) -> None:
        """`timeout` bounds the mesh's collectives."""
        self.mesh = mesh
        """All ranks in one row, which share the weights; or rows of them, each with all weights (`sharing_weights`)."""
        self.writers = writers
        """The same ranks as a group of its own, in which checkpoints are written while training goes on."""
        self.per_node = per_node
        """Ranks on each node, which share its cores."""
        self.sequences = sequences
        """The ranks with the same rows as this one, each with its share of their tokens, or None for a rank alone."""
        self.count = 1 if mesh is None else mesh.size()
        self.sharing = 1 if mesh is None else mesh.size(-1)
        """Ranks that share the weights; as many consecutive ones have all of them."""
        self.index = 0 if mesh is None else mesh.get_rank()
        per_row = 1 if sequences is None else sequences.size
        self.row_groups = self.count // per_row
        """Groups of ranks with rows of their own."""
        self.row_group = self.index // per_row
        self._timeout = timeout
        self._divided: dict[int, Ranks] = {}
        self._sharing: dict[int, Ranks] = {}

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes files and answers."""
        return self.index == 0

    @property
    def reports(self) -> bool:
        """Return whether this rank's results count, of those with the same rows."""
        return self.sequences is None or self.sequences.index == 0

    def dividing_sequences(self, size: int) -> "Ranks":
        """The same ranks, of which each `size` consecutive ones divide the tokens of a row. A collective.

        Without a mesh they are as they were. Raises ValueError unless `size` divides their number.
        """
        if self.mesh is None or size == 1:
            return self
        if self.count % size:
            raise ValueError(
                "expected trackway.learner_ranks to be a multiple of actor.ulysses_sequence_parallel_size "
                f"({size}), got {self.count}; change one of them"
            )
        if size not in self._divided:
            rows = torch.arange(self.count).view(-1, size)
            own = SequenceRanks(size, self.index % size, self._own_group(rows))
            self._divided[size] = Ranks(self.mesh, self._timeout, own, self.writers, self.per_node)
        return self._divided[size]

    def sharing_weights(self, size: int) -> "Ranks":
        """The same ranks, of which each `size` consecutive ones share the weights; all for 0 or less, or for more.

        A collective. Raises ValueError unless `size` divides their number.
        """
        if self.mesh is None or not 0 < size < self.count:
            return self
        if self.count % size:
            raise ValueError(
                f"expected trackway.learner_ranks to be a multiple of fsdp_size ({size}), got {self.count}; change one "
                "of them"
            )
        if size not in self._sharing:
            rows = torch.arange(self.count).view(-1, size)
            groups = [self._own_group(rows.T), self._own_group(rows)]
            names = ("replicas", "shards")
            mesh = DeviceMesh.from_group(groups, self.mesh.device_type, mesh=rows, mesh_dim_names=names)
            self._sharing[size] = Ranks(mesh, self._timeout, self.sequences, self.writers, self.per_node)
        return self._sharing[size]

    def _own_group(self, groups: Tensor) -> ProcessGroup:
        """The group of this rank, where each row of `groups` becomes one. A collective."""
        own: ProcessGroup | None = None
        for members in groups.tolist():
            group = distributed.new_group(members, timeout=self._timeout)
            own = cast(ProcessGroup, group) if self.index in members else own
        assert own is not None
        return own

    def summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks of their values on the CPU, which may be overwritten. A collective."""
        if self.mesh is not None:
            distributed.all_reduce(values)
        return values

    def of_each(self, work: Callable[[], T], adapter: TypeAdapter[T]) -> list[T]:
        """Return the work's result in each rank, as the adapter's type. A collective.

        An OSError of any rank is raised in all, with its errno, text and file.
        """
        if self.mesh is None:
            return [work()]
        result, failure, own = None, None, None
        try:
            result = work()
        except OSError as error:
            failure, own = error, _Failure.of(error)
        for other in gather(_FAILURE, own):
            if other is not None:
                raise other.error() from failure
        return gather(adapter, cast(T, result))


class _Failure(NamedTuple):
    """An OSError as ranks send it."""

    errno: int | None
    text: str
    file: str | None

    @classmethod
    def of(cls, error: OSError) -> Self:
        text = str(error) if error.errno is None else str(error.strerror)
        return cls(error.errno, text, None if error.filename is None else str(error.filename))

    def error(self) -> OSError:
        """The same error, of Python's class for this errno."""
        return OSError(self.text) if self.errno is None else OSError(self.errno, self.text, self.file)


_FAILURE = TypeAdapter(_Failure | None)

ALONE = Ranks()
"""One process."""


def join(store: Store, index: int, placement: Placement, device: str, deadline_s: float) -> Ranks:
    """The ranks, once all of them have called this with their own `index`.

    `store` is the same for all. `device` is a key of BACKENDS, and on GPUs a rank takes the device of its local rank. A
    collective that a rank has not joined within `deadline_s` seconds is an error in all others.
    """
    if device == "cuda":
        torch.cuda.set_device(placement.local_rank(index))
    timeout, count = timedelta(seconds=deadline_s), placement.ranks
    distributed.init_process_group(BACKENDS[device], store=store, rank=index, world_size=count, timeout=timeout)
    # Collectives of two threads in one group would mix.
    writers = cast(ProcessGroup, distributed.new_group(backend="gloo", timeout=timedelta(seconds=WRITE_S)))
    return Ranks(init_device_mesh(device, (count,)), timeout, writers=writers, per_node=placement.per_node)


def shard(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool,
    offload: bool,
    forward_prefetch: bool = False,
    gather_dtype: torch.dtype | None = None,
) -> None:
    """Shards the weights over the mesh, by layers. What is left, tied weights among it, is the root's.

    `reshard_after_forward` frees the gathered weights of a layer until its backward. `forward_prefetch` begins to
    gather those of the next layer before a layer's forward. `offload` keeps the shards in main memory, and has no
    effect on CPUs. `gather_dtype` is that in which weights are gathered and computed with. None for their own, as those
    of a model that keeps some in float32. Shards, gradients and their sums stay in the dtype of the weights, except
    sums for bfloat16, which are in float32.
    """
    if kept_in_float32(model, model.named_parameters()):
        gather_dtype = None
    policy = CPUOffloadPolicy() if offload and mesh.device_type != "cpu" else OffloadPolicy()
    computed = {gather_dtype or parameter.dtype for parameter in model.parameters()}
    precision = MixedPrecisionPolicy(
        param_dtype=gather_dtype,
        reduce_dtype=torch.float32 if torch.bfloat16 in computed else None,
        cast_forward_inputs=False,  # hidden states have the dtype that autocast and the embedding give them
    )
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    for layer in layers:
        fully_shard(
            layer, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision, offload_policy=policy
        )
    if forward_prefetch:
        for layer, following in pairwise(cast(list[FSDPModule], layers)):
            layer.set_modules_to_forward_prefetch([following])
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed, not averaged: losses are already divided by totals of the whole mini-batch.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def kept_in_float32(model: PreTrainedModel, tensors: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Names of tensors that the model's class keeps in float32 where the others are bfloat16."""
    parts = model._keep_in_fp32_modules_strict or ()
    return [(name, tensor) for name, tensor in tensors if any(part in name for part in parts)]


def reshard(model: PreTrainedModel) -> None:
    """Frees the gathered weights that FSDP2 keeps after a forward without a backward: the root's, at least."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor. A collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(tensors: Mapping[str, Tensor], keep: bool, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The whole tensors on the CPU. Empty unless `keep`. A collective if one of them is sharded."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        complete = whole(tensor).detach()
        if keep:
            result[name] = complete.to("cpu", dtype).contiguous()
    return result


def gathered_in(rank: int, tensor: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor | None:
    """The whole tensor on the CPU in one rank, None in the others. A collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", dtype).contiguous() if ranks.index == rank else None
    if ranks.index // ranks.sharing != rank // ranks.sharing:
        return None  # each rank is given what it lacks by those that share the weights with it
    # FSDP2 gives each rank as many rows as torch.chunk: the last ones may have fewer, or none.
    rows, group = -(-tensor.shape[0] // ranks.sharing), tensor.device_mesh.get_group(-1)
    with torch.no_grad():
        shard = tensor.to_local().to(dtype)
    padded = torch.zeros((rows, *tensor.shape[1:]), dtype=dtype, device=shard.device)
    padded[: len(shard)] = shard
    if ranks.index != rank:
        distributed.gather(padded, dst=rank, group=group)
        return None
    complete = torch.empty((rows * ranks.sharing, *tensor.shape[1:]), dtype=dtype, device=shard.device)
    distributed.gather(padded, list(complete.split(rows)), dst=rank, group=group)
    return complete[: tensor.shape[0]].to("cpu")


def scatter_into(target: Tensor, complete: Tensor | None, ranks: Ranks) -> None:
    """Copies the first rank's whole tensor, or this rank's rows of it if `target` is sharded. A collective."""
    with torch.no_grad():
        own = target.to_local() if isinstance(target, DTensor) else target
    if not isinstance(target, DTensor):
        if complete is not None:
            own.copy_(complete)
        distributed.broadcast(own, src=0)
        return
    rows = -(-target.shape[0] // ranks.sharing)
    received = torch.empty((rows, *target.shape[1:]), dtype=target.dtype, device=own.device)
    parts: list[Tensor] | None = None
    if complete is not None:
        padded = torch.zeros((rows * ranks.sharing, *target.shape[1:]), dtype=target.dtype, device=own.device)
        padded[: target.shape[0]] = complete
        parts = list(padded.split(rows)) * (ranks.count // ranks.sharing)
    distributed.scatter(received, parts, src=0)
    own.copy_(received[: len(own)])


def require_finite_shards(tensors: Mapping[str, Tensor], ranks: "Ranks") -> None:
    """Raises NotFiniteError in every rank unless all values of the tensors are finite. A collective."""
    counts = ranks.summed(torch.tensor([not_finite(tensor) for tensor in local(tensors.values())]))
    require_none(tensors, (counts // (ranks.count // ranks.sharing)).tolist())


def shard_like(complete: Tensor, like: Tensor) -> Tensor:
    """The whole tensor, or this rank's shard of it if `like` is sharded. Every rank has the whole one."""
    if not isinstance(like, DTensor):
        return complete
    return distribute_tensor(complete, like.device_mesh, like.placements, src_data_rank=None)


def local(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """Share of this rank of each tensor."""
    with torch.no_grad():  # with gradients, to_local() would return another object
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
