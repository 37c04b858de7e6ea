"""Assigns the slots of the KV cache, reusing the longest prefix that is already cached.

A finished sequence's slot keeps its tokens until the slot is needed. A prompt that extends them takes the slot over
(the next turn of a trajectory); a prompt that shares a prefix with any slot copies it (the samples of one prompt). A
prompt whose prefix is computed in the current step waits one step instead of computing it again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WORTH_A_STEP = 8
"""Minimum saving in tokens for which a sequence waits one step."""


class SlotAllocation(NamedTuple):
    """A slot, and the number of prompt tokens that are already cached in `source`."""

    slot: int
    cached: int
    source: int
    """Slot to copy the cached tokens from. The same slot when they are already there."""


class SlotTable:
    """The tokens of every slot. `ready` positions are reusable now, `promised` ones after the current step."""

    def __init__(self, slots: int, max_len: int) -> None:
        self._ids = np.zeros((slots, max_len), dtype=np.int64)
        self._ready = np.zeros(slots, dtype=np.int64)
        self._promised = np.zeros(slots, dtype=np.int64)
        self._free = np.ones(slots, dtype=bool)
        self._fresh = np.ones(slots, dtype=bool)
        self._released = np.zeros(slots, dtype=np.int64)
        self._clock = 0

    @property
    def free(self) -> int:
        """Number of free slots."""
        return int(self._free.sum())

    def allocate(self, prompt: Sequence[int], *, reuse: bool = True) -> SlotAllocation | None:
        """Allocate the best slot for a prompt. None when waiting one step saves computing. Needs a free slot.

        Without `reuse` the prompt is to be computed from its first token.
        """
        tokens = np.asarray(prompt)
        if not reuse:
            slot = self._least_useful()
            self._take(slot, tokens, kept=0)
            return SlotAllocation(slot, 0, slot)
        common = self._common(tokens)
        ready = np.minimum(common, self._ready)
        whole = self._free & (ready == self._ready)
        best = int((2 * ready + whole).argmax())
        if np.minimum(common, self._promised).max() >= ready[best] + _WORTH_A_STEP:
            return None
        slot = best if whole[best] and ready[best] else self._least_useful()
        # The last token is always computed: the first output token depends on its logits.
        cached = min(int(ready[best]), len(tokens) - 1)
        self._take(slot, tokens, kept=cached if slot == best else 0)
        return SlotAllocation(slot, cached, best if cached else slot)

    def commit(self, slot: int, length: int) -> None:
        """Record that the first `length` tokens of the slot are computed."""
        self._ready[slot] = length
        self._promised[slot] = 0

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """Free the slot, which keeps `tokens` (those whose KV was computed)."""
        self._clock += 1
        self._released[slot] = self._clock
        self._free[slot] = True
        self._promised[slot] = 0
        self._ready[slot] = len(tokens) if self._fresh[slot] else 0
        self._ids[slot, : len(tokens)] = tokens

    def reset_prefix_cache(self) -> None:
        """Invalidate all cached tokens, as the weights have changed."""
        self._ready[:] = 0
        self._promised[:] = 0
        self._fresh[:] = False

    def _common(self, tokens: np.ndarray) -> np.ndarray:
        """[slots]: number of leading tokens that each slot shares with the prompt."""
        same = self._ids[:, : len(tokens)] == tokens
        return np.where(same.all(axis=1), len(tokens), same.argmin(axis=1))

    def _least_useful(self) -> int:
        """A free slot: an empty one, else the least recently released."""
        age = np.where(self._ready == 0, 0, self._released)
        return int(np.where(self._free, age, self._clock + 1).argmin())

    def _take(self, slot: int, tokens: np.ndarray, kept: int) -> None:
        self._ids[slot, : len(tokens)] = tokens
        self._ready[slot] = kept
        self._promised[slot] = len(tokens)
        self._free[slot] = False
        self._fresh[slot] = True
