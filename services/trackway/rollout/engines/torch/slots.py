"""Which slot of the KV cache holds which tokens, and where a new prompt starts with the most of it already there.

A finished request's slot keeps its tokens until it is needed. A prompt that extends them takes the slot over (the
next turn of a trajectory); a prompt that shares a beginning with any slot copies it (the samples of one prompt). A
prompt whose beginning is being computed by one admitted in this very step waits one step and computes it not again.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WORTH_A_STEP = 8
"""Tokens that must be saved for a request to wait one step."""


class Place(NamedTuple):
    """A slot, and how many of the prompt's tokens need no computing because `source` holds them."""

    slot: int
    cached: int
    source: int
    """Slot to copy the cached tokens from; the slot itself when they lie there already."""


class SlotTable:
    """The tokens of every slot. `ready` positions may be reused now, `promised` ones after this step."""

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
        """Slots that a prompt could take."""
        return int(self._free.sum())

    def place(self, prompt: Sequence[int]) -> Place | None:
        """The best slot for a prompt, taken; None when waiting one step saves computing. Needs a free slot."""
        tokens = np.asarray(prompt)
        common = self._common(tokens)
        ready = np.minimum(common, self._ready)
        whole = self._free & (ready == self._ready)
        best = int((2 * ready + whole).argmax())
        if np.minimum(common, self._promised).max() >= ready[best] + _WORTH_A_STEP:
            return None
        slot = best if whole[best] and ready[best] else self._least_useful()
        # The last token is always computed: its logits choose the first new one.
        cached = min(int(ready[best]), len(tokens) - 1)
        self._take(slot, tokens, kept=cached if slot == best else 0)
        return Place(slot, cached, best if cached else slot)

    def commit(self, slot: int, length: int) -> None:
        """The slot now holds the first `length` of the tokens it was given."""
        self._ready[slot] = length
        self._promised[slot] = 0

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """The request is over; the slot holds `tokens` (those whose KV was computed)."""
        self._clock += 1
        self._released[slot] = self._clock
        self._free[slot] = True
        self._promised[slot] = 0
        self._ready[slot] = len(tokens) if self._fresh[slot] else 0
        self._ids[slot, : len(tokens)] = tokens

    def forget(self) -> None:
        """Nothing that was computed so far may be reused: the weights have changed."""
        self._ready[:] = 0
        self._promised[:] = 0
        self._fresh[:] = False

    def _common(self, tokens: np.ndarray) -> np.ndarray:
        """[slots]: how many leading tokens of each slot equal the prompt's."""
        same = self._ids[:, : len(tokens)] == tokens
        return np.where(same.all(axis=1), len(tokens), same.argmin(axis=1))

    def _least_useful(self) -> int:
        """A free slot: an empty one, else the one that was released first."""
        age = np.where(self._ready == 0, 0, self._released)
        return int(np.where(self._free, age, self._clock + 1).argmin())

    def _take(self, slot: int, tokens: np.ndarray, kept: int) -> None:
        self._ids[slot, : len(tokens)] = tokens
        self._ready[slot] = kept
        self._promised[slot] = len(tokens)
        self._free[slot] = False
        self._fresh[slot] = True
