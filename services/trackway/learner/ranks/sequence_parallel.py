"""Ulysses: the tokens of a packed row divided over ranks (Jacobs et al., 2023, arXiv 2309.14509).

Each of P ranks computes a P-th of a row's tokens, with all weights. Only attention needs the whole row: there the ranks
exchange tokens for heads, so that each has all tokens of a P-th of the heads, and afterwards back. What is measured of
the tokens is gathered, so that each rank computes the loss of the whole row, whose gradient flows back into the rank's
own tokens alone. So gradients are summed over all ranks, as without it, and none is counted twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that compute the same rows, as one of them sees them."""

    size: int
    index: int
    group: ProcessGroup

    def share(self, row: Tensor) -> Tensor:
        """[1, s]: this rank's tokens of a row [1, S], which is padded with zeros to equal shares."""
        return self.padded(row).chunk(self.size, dim=1)[self.index]

    def padded(self, row: Tensor) -> Tensor:
        """[1, P s] of a row [1, S]."""
        return torch.nn.functional.pad(row, (0, -row.shape[1] % self.size))

    def by_heads(self, values: Tensor) -> Tensor:
        """[1, h / P, P s, D]: all tokens of this rank's heads, from all heads of its tokens [1, h, s, D]."""
        _, heads, tokens, width = values.shape
        received = self._exchange(values.reshape(self.size, heads // self.size, tokens, width))
        return received.transpose(0, 1).reshape(1, heads // self.size, self.size * tokens, width)

    def by_tokens(self, values: Tensor) -> Tensor:
        """[1, s, h, D]: all heads of this rank's tokens, from all tokens of its heads [1, P s, h / P, D]."""
        _, tokens, heads, width = values.shape
        received = self._exchange(values.reshape(self.size, tokens // self.size, heads, width))
        return received.transpose(0, 1).reshape(1, tokens // self.size, self.size * heads, width)

    def share_of(self, values: Tensor, whole: Tensor) -> Tensor:
        """[n, ...]: this rank's of the values [N, ...] at the N places of the mask `whole` [1, S]."""
        return values.split(self.padded(whole).view(self.size, -1).sum(-1).tolist())[self.index]

    def gathered(self, values: Sequence[Tensor], own: Tensor, whole: Tensor) -> list[Tensor]:
        """[N] each, for the N places of the mask `whole` [1, S], of values [n] at this rank's share `own` [1, s]."""
        columns = torch.stack(list(values), dim=-1)
        tokens = columns.new_zeros(own.shape[1], columns.shape[1]).masked_scatter(own.squeeze(0).unsqueeze(-1), columns)
        return list(cast(Tensor, _Gather.apply(tokens, self))[self.padded(whole).squeeze(0)].unbind(-1))

    def _exchange(self, parts: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(parts, self))


class _Exchange(Function):
    """[P, ...]: sends the p-th part to the p-th rank, and receives one of each."""

    @staticmethod
    def forward(ctx: FunctionCtx, parts: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks  # pyright: ignore[reportAttributeAccessIssue]  # as torch documents it
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(received, parts.contiguous(), group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        ranks = cast(SequenceRanks, ctx.ranks)  # pyright: ignore[reportAttributeAccessIssue]
        return _Exchange.forward(ctx, gradients[0], ranks), None


class _Gather(Function):
    """[P s, ...] from the [s, ...] of each rank. The gradient of a rank's own part goes back to it."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, ranks: SequenceRanks) -> Tensor:
        ctx.ranks = ranks  # pyright: ignore[reportAttributeAccessIssue]
        parts = [torch.empty_like(part) for _ in range(ranks.size)]
        distributed.all_gather(parts, part.contiguous(), group=ranks.group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        ranks = cast(SequenceRanks, ctx.ranks)  # pyright: ignore[reportAttributeAccessIssue]
        return gradients[0].chunk(ranks.size)[ranks.index], None


def require_divisible(model: PreTrainedModel, size: int, *, packs: bool) -> None:
    """Raises ValueError for a model whose rows cannot be divided over `size` ranks."""
    key, heads = "actor.ulysses_sequence_parallel_size", model.config.get_text_config().num_attention_heads
    if not packs:
        raise ValueError(
            f"expected packed rows with {key}={size}, got padded ones: {type(model).__name__} has other layers than "
            "full attention, or model.use_remove_padding is false; set it to 1"
        )
    if heads % size:
        raise ValueError(f"expected {key} to divide the model's {heads} attention heads, got {size}; lower it")
