"""The decoder's forward pass over slot KV: ragged rows in, logits of each row's last token out.

Everything is a function of (weights, cache, batch): weights are swapped by reference between two steps, so a load
that fails has touched nothing. Small models are bound by the number of operations, hence: q/k/v and gate/up are one
matrix each, q and k share one norm and one rotation, query heads fold onto their KV head instead of expanding it,
and rows whose slots are neighbours read the cache as a view.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from trackway.rollout.engines.torch.model_config import DecoderConfig


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; matrices are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm of q repeated per head, then that of k."""
    o: Tensor
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of one version; `lm_head` is `embed` itself when the checkpoint ties them and names no other."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class KVCache:
    """Keys and values, [layer, 2, slot, kv_head, position, head_dim]; positions grow by doubling up to a limit.

    The last position is scratch: padding writes there and nothing reads it. Zeros, not garbage, fill what was never
    written, because a masked position still multiplies its value by 0.
    """

    def __init__(self, config: DecoderConfig, slots: int, max_len: int, device: torch.device, dtype: torch.dtype):
        self._limit = max_len + 1
        shape = (config.num_layers, 2, slots, config.num_kv_heads, min(256, self._limit), config.head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def scratch(self) -> int:
        """The position that padding is written to."""
        return self.data.shape[4] - 1

    def reserve(self, positions: int) -> None:
        """Make room for `positions` tokens in every slot."""
        if positions <= self.scratch:
            return
        capacity = min(self._limit, max(2 * self.data.shape[4], positions + 1))
        grown = self.data.new_zeros(*self.data.shape[:4], capacity, self.data.shape[5])
        grown[..., : self.scratch, :] = self.data[..., : self.scratch, :]
        self.data = grown

    def copy(self, sources: list[int], targets: list[int], positions: int) -> None:
        """Copy the first `positions` of slots to others; all sources are read before any target is written."""
        if sources:
            self.data[:, :, targets, :, :positions] = self.data[:, :, sources, :, :positions]

    def clear(self, slot: int) -> None:
        """Forget what a slot holds; needed after non-finite values, which would survive a mask."""
        self.data[:, :, slot] = 0


@dataclass(frozen=True)
class Batch:
    """Rows that run together: `tokens` [rows, new] is padded on the right, `lengths` [rows] are the real counts."""

    tokens: Tensor
    starts: Tensor
    """[rows]: tokens of each row that the cache holds already."""
    lengths: Tensor
    slots: list[int]
    positions: int
    """Largest start + length of a row."""


@dataclass(frozen=True)
class _Step:
    """What all layers of one forward share."""

    cos: Tensor
    sin: Tensor
    mask: Tensor
    """Decoding one token: added to scores, [rows * kv_heads, 1, positions]. Else boolean, [rows, 1, new, positions]."""
    rows: slice | Tensor
    write: tuple[Tensor, slice, Tensor]
    positions: int


class Decoder:
    """The forward pass of one architecture on one device."""

    def __init__(self, config: DecoderConfig, max_len: int, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.max_len, self.device, self.dtype = config, max_len, device, dtype
        self._cos, self._sin = rope_tables(config, max_len + 1, device, dtype)

    def cache(self, slots: int) -> KVCache:
        """An empty cache for this decoder."""
        return KVCache(self.config, slots, self.max_len, self.device, self.dtype)

    def forward(self, weights: DecoderWeights, cache: KVCache, batch: Batch) -> Tensor:
        """Logits [rows, vocab] in float32 after each row's last real token; fills the cache with the new tokens."""
        hidden = self._hidden(weights, cache, batch)
        last = hidden[torch.arange(len(batch.slots), device=self.device), batch.lengths - 1]
        return F.linear(last, weights.lm_head).float()

    def score(self, weights: DecoderWeights, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of tokens 1..n-1 given those before them; uses no slot."""
        tokens = torch.tensor([token_ids], device=self.device)
        start, length = torch.tensor([[0], [len(token_ids)]], device=self.device)
        cache = self.cache(slots=1)
        cache.reserve(len(token_ids))
        hidden = self._hidden(weights, cache, Batch(tokens, start, length, [0], len(token_ids)))
        logprobs = torch.log_softmax(F.linear(hidden[0, :-1], weights.lm_head).float(), -1)
        return logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()

    def _hidden(self, weights: DecoderWeights, cache: KVCache, batch: Batch) -> Tensor:
        step = self._step(cache, batch)
        x = F.embedding(batch.tokens, weights.embed)
        for layer, kv in zip(weights.layers, cache.data, strict=True):
            x = x + self._attention(layer, self._norm(x, layer.input_norm), kv, step)
            x = x + _mlp(layer, self._norm(x, layer.mlp_norm))
        return self._norm(x, weights.norm)

    def _attention(self, layer: LayerWeights, x: Tensor, kv: Tensor, step: _Step) -> Tensor:
        c = self.config
        heads = (c.num_heads + c.num_kv_heads, c.num_kv_heads)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias).unflatten(-1, (sum(heads), c.head_dim))
        qk, v = qkv.split(heads, dim=2)
        if layer.qk_norm is not None:
            qk = self._norm(qk, None) * layer.qk_norm
        qk = torch.addcmul(qk * step.cos, qk.roll(c.head_dim // 2, -1), step.sin)
        kv[0][step.write] = qk[:, :, c.num_heads :]
        kv[1][step.write] = v
        keys, values = kv[0][step.rows, :, : step.positions], kv[1][step.rows, :, : step.positions]
        attend = _attend_one if x.shape[1] == 1 else _attend_many
        return F.linear(attend(qk[:, :, : c.num_heads], keys, values, step.mask), layer.o, layer.o_bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _step(self, cache: KVCache, batch: Batch) -> _Step:
        new = batch.tokens.shape[1]
        offsets = torch.arange(new, device=self.device)
        positions = batch.starts[:, None] + offsets
        if new > 1:
            positions = positions.where(offsets < batch.lengths[:, None], cache.scratch)
        visible = torch.arange(batch.positions, device=self.device) <= positions[..., None]
        slots = torch.tensor(batch.slots, device=self.device)
        return _Step(
            cos=self._cos[positions][:, :, None],
            sin=self._sin[positions][:, :, None],
            mask=self._scores_mask(visible) if new == 1 else visible[:, None],
            rows=neighbours(batch.slots) or slots,
            write=(slots[:, None], slice(None), positions),
            positions=batch.positions,
        )

    def _scores_mask(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, device=self.device, dtype=self.dtype).masked_fill_(~visible, float("-inf"))
        return mask.repeat_interleave(self.config.num_kv_heads, dim=0)


def neighbours(slots: list[int]) -> slice | None:
    """The slice that equals the slots in their order, or None when there is none."""
    first = slots[0]
    return slice(first, first + len(slots)) if slots == list(range(first, first + len(slots))) else None


def rope_tables(
    config: DecoderConfig, positions: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sign-carrying sin, [positions, head_dim]: x * cos + roll(x, head_dim / 2) * sin rotates x.

    Su et al. 2021 (RoFormer) in the half-split order of the Hugging Face checkpoints.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    angles = torch.arange(positions).float()[:, None] / config.rope_theta**half
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device, dtype), torch.cat((-sin, sin), -1).to(device, dtype)


def _attend_one(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One query per row: [rows, 1, heads, dim] over [rows, kv_heads, positions, dim]; two batched products."""
    rows, _, heads, dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.reshape(rows * kv_heads, heads // kv_heads, dim)
    scores = torch.baddbmm(mask, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=dim**-0.5)
    return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(rows, 1, heads * dim)


def _attend_many(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Many queries per row, without holding all scores: [rows, new, heads, dim] -> [rows, new, heads * dim]."""
    grouped = q.shape[2] != keys.shape[1]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2).flatten(2)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = F.linear(x, layer.gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down)
