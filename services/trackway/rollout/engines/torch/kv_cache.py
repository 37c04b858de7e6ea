"""The keys and values of every slot."""

import torch

from trackway.rollout.engines.torch.model_config import DecoderConfig


class KVCache:
    """Keys and values, [layer, 2, slot, kv_head, position, head_dim]; positions grow by doubling up to a limit.

    Unwritten positions are zero, because a masked position still multiplies its value by 0.
    """

    def __init__(self, config: DecoderConfig, slots: int, max_len: int, device: torch.device, dtype: torch.dtype):
        self._limit = max_len
        shape = (config.num_layers, 2, slots, config.num_kv_heads, min(256, max_len), config.head_dim)
        self.data = torch.zeros(shape, device=device, dtype=dtype)

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
        """Copy the first `positions` of slots to others; all sources are read before any target is written."""
        if sources:
            self.data[:, :, targets, :, :positions] = self.data[:, :, sources, :, :positions]

    def clear(self, slot: int) -> None:
        """Clear a slot; needed after non-finite values, which would survive a mask."""
        self.data[:, :, slot] = 0
