"""A micro-batch as one row without padding: its sequences end to end, each with positions from 0.

Attention is computed sequence by sequence, on GPUs in one call of PyTorch's kernel for sequences of any lengths. So a
token sees exactly what it sees in a separate row, and the work grows with the sum of the squared lengths. A mask of the
whole row, which transformers builds from such positions, would grow with the square of the sum and rule out the causal
kernels.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from trackway.learner.batch import TrainingBatch
from trackway.learner.ranks.sequence_parallel import SequenceRanks

ATTENTION = "trackway_by_sequence"
FULL = "full_attention"


@dataclass
class SequenceLengths:
    """Boundaries in a packed row; passed to the attention layers through the model's keyword arguments."""

    sizes: list[int]
    ranks: SequenceRanks | None = None
    """The ranks over which the tokens of the row are divided, or None for a whole row."""
    seen: bool = False
    """True if an attention layer has used it."""
    _offsets: Tensor | None = None

    def offsets(self, device: torch.device) -> Tensor:
        """Return [sequences + 1] int32: where each sequence begins, and the end of the last."""
        if self._offsets is None:
            self._offsets = torch.tensor([0, *accumulate(self.sizes)], dtype=torch.int32, device=device)
        return self._offsets

    def check_seen(self, model: PreTrainedModel) -> None:
        """Raises RuntimeError when no attention layer used the lengths, and so treated the row as one sequence."""
        if not self.seen:
            raise RuntimeError(
                f"expected the attention of {type(model).__name__} to be given the lengths of {len(self.sizes)} "
                "sequences, got none; set actor_rollout_ref.model.use_remove_padding=false"
            )


@dataclass(frozen=True)
class PackedRow:
    """The S input tokens of a batch, or one rank's share of them.

    The last token of a trajectory predicts nothing and is not an input.
    """

    input_ids: Tensor
    """[1, S]."""
    target_ids: Tensor
    """[1, S] or [1, S, K]: the tokens that they predict."""
    position_ids: Tensor
    """[1, S]."""
    response_mask: Tensor
    """[1, S] bool: True where the predicted token was written by the model."""
    lengths: SequenceLengths

    @classmethod
    def of(cls, batch: TrainingBatch) -> Self:
        """The rows of a batch in their order."""
        inputs = batch.attention_mask[:, 1:]
        positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
        return cls(
            input_ids=batch.input_ids[:, :-1][inputs].unsqueeze(0),
            target_ids=batch.target_ids[inputs].unsqueeze(0),
            position_ids=positions[inputs].unsqueeze(0),
            response_mask=batch.response_mask[inputs].unsqueeze(0),
            lengths=SequenceLengths((batch.lengths - 1).tolist()),
        )

    def share(self, ranks: SequenceRanks) -> Self:
        """This rank's tokens of the row. Padding is a sequence of its own."""
        padding = -self.input_ids.shape[1] % ranks.size
        return type(self)(
            input_ids=ranks.share(self.input_ids),
            target_ids=ranks.share(self.target_ids),
            position_ids=ranks.share(self.position_ids),
            response_mask=ranks.share(self.response_mask),
            lengths=SequenceLengths(self.lengths.sizes + [padding] * bool(padding), ranks),
        )


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether every layer of a model is full causal attention, the only kind that can be split by sequence here.

    A sliding window would need its own mask, and a recurrent layer would carry its state into the next sequence.
    """
    config = model.config.get_text_config()
    return (
        model._supports_attention_backend
        and model.config._attn_implementation in ("sdpa", ATTENTION)
        and not model._is_stateful
        and set(getattr(config, "layer_types", None) or [FULL]) == {FULL}
        and getattr(config, "sliding_window", None) is None
    )


class _Causal(torch.nn.Module):
    """An attention layer with as many key and value heads as query heads."""

    is_causal = True


_CAUSAL = _Causal()
_HALF = (torch.bfloat16, torch.float16)


def attend_by_sequence(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_lengths: SequenceLengths | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """PyTorch's attention over [B, heads, S, D], or over each sequence of a packed row [1, heads, S, D].

    Of a row that is divided over ranks, each has its own S tokens.
    """
    ranks = None if sequence_lengths is None else sequence_lengths.ranks
    queries_of_head = query.shape[1] // key.shape[1]
    divides = ranks is None or key.shape[1] % ranks.size == 0
    if queries_of_head > 1 and not (divides and _takes_grouped_heads(query)):
        key = key.repeat_interleave(queries_of_head, dim=1)
        value = value.repeat_interleave(queries_of_head, dim=1)
        module = _CAUSAL
    if sequence_lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)  # pyright: ignore[reportArgumentType]
    sequence_lengths.seen = True
    if ranks is not None:
        query, key, value = map(ranks.by_heads, (query, key, value))
    if _takes_all_sequences(query, value) and not kwargs.get("dropout"):
        output = _attend_in_one_call(query, key, value, sequence_lengths, kwargs.get("scaling"))
    else:
        parts = (states.split(sequence_lengths.sizes, 2) for states in (query, key, value))
        outputs = [sdpa_attention_forward(module, q, k, v, None, **kwargs)[0] for q, k, v in zip(*parts, strict=True)]  # pyright: ignore[reportArgumentType]
        output = torch.cat(outputs, dim=1)
    return output if ranks is None else ranks.by_tokens(output), None


def _attend_in_one_call(query: Tensor, key: Tensor, value: Tensor, lengths: SequenceLengths, scaling: object) -> Tensor:
    """Return [1, S, heads, D]: causal attention within each sequence of [1, heads, S, D]."""
    dtype, offsets, longest = _dtype_of(query), lengths.offsets(query.device), max(lengths.sizes)
    output = varlen_attn(
        *(states[0].transpose(0, 1).to(dtype) for states in (query, key, value)),
        cu_seq_q=offsets,
        cu_seq_k=offsets,
        max_q=longest,
        max_k=longest,
        scale=scaling if isinstance(scaling, float) else None,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, Tensor)
    return output.unsqueeze(0)


def _takes_grouped_heads(query: Tensor) -> bool:
    """Return whether a kernel that keeps no S x S scores takes fewer heads of keys than of queries.

    On GPUs only flash attention does, in half precision; the memory-efficient kernel wants equal heads (PyTorch's
    `sdp_utils.cpp`).
    """
    return not _on_gpu(query) or _dtype_of(query) in _HALF


def _takes_all_sequences(query: Tensor, value: Tensor) -> bool:
    """Return whether flash attention takes these tensors: half precision, on Ampere or newer, in heads of up to 256."""
    width = query.shape[-1]
    fits = width == value.shape[-1] <= 256 and width % 8 == 0
    return fits and _on_gpu(query) and _dtype_of(query) in _HALF and _is_ampere(query.device)


def _is_ampere(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _dtype_of(tensor: Tensor) -> torch.dtype:
    """The type in which attention is computed: autocast's where it is on."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


AttentionInterface.register(ATTENTION, attend_by_sequence)
