"""The decoder's forward pass over slot KV: ragged rows in, logits of each row's last token out.

Everything is a function of (weights, cache, rows): weights are swapped by reference between two steps, so a failed
load changes nothing. Large batches are bound by arithmetic and memory: there is no padding, the last layer computes
only what the logits need, keys and values of adjacent slots are read in place, and query heads are folded onto their
KV head instead of expanding it. Small batches are bound by the number of operations: q/k/v and gate/up are one matrix
each, q and k share one norm and one rotation, and residuals are added within the matrix product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trackway.rollout.engines.torch.model_config import DecoderConfig
from trackway.wire.rollout import PromptLogprobs

_WORTH_A_CUT = 512
"""Wasted cache positions that cost as much as another attention call: some 256 KiB of a small model's cache."""


class Row(NamedTuple):
    """New tokens of one sequence, whose first `start` tokens are in the cache's `slot`."""

    slot: int
    start: int
    token_ids: list[int]

    @property
    def end(self) -> int:
        """Tokens in the slot afterwards."""
        return self.start + len(self.token_ids)


class DecodeRun(NamedTuple):
    """Rows of one new token each, computed in one attention call."""

    first: int
    """Index of the first token in the flat batch."""
    last: int
    slots: slice | Tensor
    mask: Tensor
    """[rows * kv_heads, 1, longest]: added to the scores."""

    @property
    def longest(self) -> int:
        """The most positions that a row attends to."""
        return self.mask.shape[2]


class PrefillRow(NamedTuple):
    """A row of several new tokens: its place in the flat batch and in the cache."""

    slot: int
    first: int
    last: int
    end: int
    mask: Tensor | None
    """[new, end]: the positions that each new token sees, or None when causal from the start of the slot."""


@dataclass(frozen=True)
class _BatchLayout:
    """A flat batch without padding: rows of one new token first, as runs; then longer rows, as spans."""

    token_ids: Tensor
    """[tokens]"""
    slots: Tensor
    """[tokens]: each token's slot."""
    positions: Tensor
    """[tokens]: each token's position in its slot."""
    runs: list[DecodeRun]
    spans: list[PrefillRow]
    last: Tensor | None
    """[rows]: index of each row's last token, or None when every row has one token."""


def prepare_batch(rows: Sequence[Row], kv_heads: int, device: torch.device, dtype: torch.dtype) -> _BatchLayout:
    """The layout of a batch. Rows of one new token come first."""
    singles = sum(len(row.token_ids) == 1 for row in rows)
    flat = [
        [token for row in rows for token in row.token_ids],
        [row.slot for row in rows for _ in row.token_ids],
        [position for row in rows for position in range(row.start, row.end)],
    ]
    token_ids, slots, positions = torch.tensor(flat).to(device, non_blocking=True)
    spans = _spans(rows[singles:], singles, device)
    last = [*range(singles), *(span.last for span in spans)]
    parts = [range(singles)] if device.type != "cpu" and singles else cut(rows[:singles])
    return _BatchLayout(
        token_ids=token_ids,
        slots=slots,
        positions=positions,
        runs=[_run(rows, part, slots, positions, kv_heads, dtype) for part in parts],
        spans=spans,
        last=torch.tensor(last, device=device) if spans else None,
    )


def cut(rows: Sequence[Row]) -> list[range]:
    """Splits rows into parts of adjacent slots and similar length, which a CPU reads in place with little waste."""
    parts: list[range] = []
    first = longest = used = 0
    for index, row in enumerate(rows):
        longest, used = max(longest, row.end), used + row.end
        gap = row.slot - rows[first].slot != index - first
        if gap or longest * (index - first + 1) - used > _WORTH_A_CUT:
            parts.append(range(first, index))
            first, longest, used = index, row.end, row.end
    return [*parts, range(first, len(rows))] if rows else []


def neighbours(slots: list[int]) -> slice | None:
    """The slice equal to the slots in their order, or None."""
    first = slots[0]
    return slice(first, first + len(slots)) if slots == list(range(first, first + len(slots))) else None


def _run(
    rows: Sequence[Row], part: range, slots: Tensor, positions: Tensor, kv_heads: int, dtype: torch.dtype
) -> DecodeRun:
    where = slice(part.start, part.stop)
    row_slots = [row.slot for row in rows[where]]
    mask = _single_mask(positions[where], max(row.end for row in rows[where]), kv_heads, dtype)
    return DecodeRun(part.start, part.stop - 1, neighbours(row_slots) or slots[where], mask)


def _spans(rows: Sequence[Row], first: int, device: torch.device) -> list[PrefillRow]:
    spans: list[PrefillRow] = []
    for row in rows:
        new = len(row.token_ids)
        mask = torch.ones(new, row.end, dtype=torch.bool, device=device).tril(row.start) if row.start else None
        spans.append(PrefillRow(row.slot, first, first + new - 1, row.end, mask))
        first += new
    return spans


def _single_mask(positions: Tensor, longest: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.arange(longest, device=positions.device) > positions[:, None]
    mask = torch.zeros(hidden.shape, device=positions.device, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return mask.repeat_interleave(kv_heads, dim=0)[:, None]


_SCORED_TOKENS = 128
"""Prompt positions whose logits are in memory at the same time."""


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm of q repeated per head, then the norm of k."""
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of one version. `lm_head` is `embed` itself when the checkpoint ties them."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "DecoderWeights":
        """The weights with each tensor changed, always in the same order. A tied `lm_head` stays `embed` itself."""
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        def layer(weights: LayerWeights) -> LayerWeights:
            held = {name: once(tensor) for name, tensor in vars(weights).items() if tensor is not None}
            return replace(weights, **held)

        return DecoderWeights(once(self.embed), tuple(map(layer, self.layers)), once(self.norm), once(self.lm_head))

    def tensors(self) -> list[Tensor]:
        """Each tensor once, in the order of `mapped`."""
        found: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.mapped(note)
        return found

    def parameters(self) -> int:
        """The number of parameters. A tied `lm_head` counts once."""
        return sum(tensor.numel() for tensor in self.tensors())


def cache_shape(config: DecoderConfig, slots: int, max_len: int) -> tuple[int, ...]:
    """The shape of a KV cache at its start."""
    return (config.num_layers, 2, slots, config.num_kv_heads, min(256, max_len), config.head_dim)


class KVCache:
    """Keys and values, [layer, 2, slot, kv_head, position, head_dim]; positions grow by doubling up to a limit.

    Unwritten positions are zero, because a masked position still multiplies its value by 0.
    """

    def __init__(self, config: DecoderConfig, slots: int, max_len: int, device: torch.device, dtype: torch.dtype):
        self._limit = max_len
        self.data = torch.zeros(cache_shape(config, slots, max_len), device=device, dtype=dtype)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self.data.shape[2]

    def reserve(self, positions: int) -> None:
        """Make room for `positions` tokens in every slot."""
        have = self.data.shape[4]
        if positions <= have:
            return
        capacity = min(self._limit, max(2 * have, positions))
        grown = self.data.new_zeros(*self.data.shape[:4], capacity, self.data.shape[5])
        grown[..., :have, :] = self.data
        self.data = grown

    def copy(self, sources: list[int], targets: list[int], positions: int) -> None:
        """Copy the first `positions` of slots to others. All sources are read before any target is written."""
        if sources:
            self.data[:, :, targets, :, :positions] = self.data[:, :, sources, :, :positions]

    def clear(self, slot: int) -> None:
        """Clear a slot. Needed after non-finite values, which would survive a mask."""
        self.data[:, :, slot] = 0


class Decoder:
    """The forward pass of a model on a device."""

    def __init__(self, config: DecoderConfig, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.max_len, self.device, self.dtype = config, max_len, device, dtype
        self._activation = _gelu_tanh if config.gemma else F.silu
        self._heads = config.num_heads + config.num_kv_heads
        self._cos, self._sin = rope_tables(config, max_len, device, dtype)
        norm = OffsetRmsNorm if config.gemma else RmsNorm
        self._norm = norm(config.norm_eps, config.hidden_size, device, dtype)
        self._head_norm = RmsNorm(config.norm_eps, config.head_dim, device, dtype)

    def cache(self, slots: int) -> KVCache:
        """An empty cache for this decoder."""
        return KVCache(self.config, slots, self.max_len, self.device, self.dtype)

    def forward(self, weights: DecoderWeights, cache: KVCache, rows: Sequence[Row]) -> Tensor:
        """Logits [rows, vocab] in float32 after each row's last token; fills the cache with the new tokens.

        Rows of one token come first.
        """
        layout = prepare_batch(rows, self.config.num_kv_heads, self.device, self.dtype)
        return F.linear(self._hidden(weights, cache, layout, layout.last), weights.lm_head).float()

    def score(self, weights: DecoderWeights, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of tokens 1..n-1 given the preceding ones. Uses no slot."""
        cache = self.cache(slots=1)
        cache.reserve(len(token_ids))
        return self.score_prompt(weights, cache, Row(0, 0, token_ids), 0)[1].logprobs

    def score_prompt(
        self, weights: DecoderWeights, cache: KVCache, row: Row, most_likely: int
    ) -> tuple[Tensor, PromptLogprobs]:
        """Logits [1, vocab] in float32 after a whole prompt, and its logprobs; fills the cache with it."""
        layout = prepare_batch([row], self.config.num_kv_heads, self.device, self.dtype)
        hidden = self._hidden(weights, cache, layout, None)
        scored = PromptLogprobs(logprobs=[], top_ids=[], top_logprobs=[])
        before, tokens = hidden[:-1].split(_SCORED_TOKENS), layout.token_ids[1:].split(_SCORED_TOKENS)
        for part, following in zip(before, tokens, strict=True):
            logprobs = torch.log_softmax(F.linear(part, weights.lm_head).float(), -1)
            scored.logprobs += logprobs.gather(1, following[:, None])[:, 0].tolist()
            best = logprobs.topk(min(most_likely, logprobs.shape[-1]))
            scored.top_ids += best.indices.tolist()
            scored.top_logprobs += best.values.tolist()
        return F.linear(hidden[-1:], weights.lm_head).float(), scored

    def _hidden(self, weights: DecoderWeights, cache: KVCache, layout: _BatchLayout, keep: Tensor | None) -> Tensor:
        """[tokens, hidden], or only the tokens in `keep`: other outputs of the last layer are unused."""
        cos, sin = self._cos[layout.positions], self._sin[layout.positions]
        x = F.embedding(layout.token_ids, weights.embed)
        if self.config.gemma:
            x = x * torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype)  # rounded to the type, as it was trained
        for index, (layer, kv) in enumerate(zip(weights.layers, cache.data, strict=True)):
            q = self._project(layer, self._norm(x, layer.input_norm), kv, layout, cos, sin)
            if keep is not None and index == self.config.num_layers - 1:
                x, attended = x[keep], self._attend(q[keep], kv, layout, last_only=True)
            else:
                attended = self._attend(q, kv, layout, last_only=False)
            x = torch.addmm(x if layer.o_bias is None else x + layer.o_bias, attended, layer.o.t())
            x = torch.addmm(x, _gated(layer, self._norm(x, layer.mlp_norm), self._activation), layer.down.t())
        return self._norm(x, weights.norm)

    def _project(
        self, layer: LayerWeights, x: Tensor, kv: Tensor, layout: _BatchLayout, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Queries [tokens, heads, head_dim]; keys and values go into the cache."""
        c = self.config
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).view(-1, self._heads + c.num_kv_heads, c.head_dim)
        qk = qkv[:, : self._heads]
        normed = qk if layer.qk_norm is None else self._head_norm(qk, layer.qk_norm)
        torch.addcmul(normed * cos, normed.roll(c.head_dim // 2, -1), sin, out=qk)
        kv[:, layout.slots, :, layout.positions] = qkv[:, c.num_heads :].unflatten(1, (2, c.num_kv_heads))
        return qkv[:, : c.num_heads]

    def _attend(self, q: Tensor, kv: Tensor, layout: _BatchLayout, last_only: bool) -> Tensor:
        """[tokens, heads * head_dim]. `q` holds all tokens, or the last one of each row."""
        parts: list[Tensor] = []
        for run in layout.runs:
            keys, values = kv[:, run.slots, :, : run.longest].flatten(1, 2)
            parts.append(_attend_one(q[run.first : run.last + 1], keys, values, run.mask))
        singles = layout.runs[-1].last + 1 if layout.runs else 0
        for row, span in enumerate(layout.spans, start=singles):
            keys, values = kv[:, span.slot, :, : span.end]
            new = q[row : row + 1] if last_only else q[span.first : span.last + 1]
            parts.append(_attend_many(new, keys, values, span.mask, last_only))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class RmsNorm:
    """x / rms(x) * weight; on a CPU in three operations instead of torch's eight."""

    def __init__(self, eps: float, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._eps, self._root = eps, math.sqrt(size)
        self._fused = device.type != "cpu" or dtype != torch.float32
        self._zero, self._floor = torch.tensor(0.0), torch.tensor(math.sqrt(size * eps))

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize over the last axis; `weight` broadcasts."""
        if self._fused:
            vector = weight if weight.ndim == 1 else None
            normed = F.rms_norm(x, x.shape[-1:], vector, self._eps)
            return normed if weight is vector else normed * weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.addcdiv(self._zero, x * weight, length.hypot_(self._floor), value=self._root)


class OffsetRmsNorm(RmsNorm):
    """x / rms(x) * (1 + weight), with the product in float32: Gemma's."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalize over the last axis."""
        return F.rms_norm(x.float(), x.shape[-1:], weight.float() + 1.0, self._eps).to(x.dtype)


def rope_tables(
    config: DecoderConfig, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sign-carrying sin, [positions, 1, head_dim]: x * cos + roll(x, head_dim / 2) * sin rotates x.

    Su et al. 2021 (RoFormer) in the half-split order of the Hugging Face checkpoints.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    angles = torch.arange(positions).float()[:, None] / config.rope_theta**half
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None].to(device, dtype), torch.cat((-sin, sin), -1)[:, None].to(device, dtype)


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One query per row: [rows, heads, dim] over [rows * kv_heads, positions, dim]; two batched products."""
    rows, heads, dim = q.shape
    grouped = q.reshape(keys.shape[0], -1, dim)
    scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), values).view(rows, heads * dim)


def _attend_many(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, last_only: bool) -> Tensor:
    """Many queries of one row, without storing all scores: [new, heads, dim] over [kv_heads, positions, dim]."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if last_only else mask,
        is_causal=mask is None and not last_only,
        enable_gqa=q.shape[1] != keys.shape[0],
    )
    return out[0].transpose(0, 1).flatten(1)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gated(layer: LayerWeights, x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
    return activation(gate) * up
