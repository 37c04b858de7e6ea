"""Continuous batching: sequences join when a slot is free, run in groups of similar length, and leave when finished.

The slots of the KV cache reuse the longest prefix that is already cached. A finished sequence's slot keeps its tokens
until the slot is needed. A prompt that extends them takes the slot over (the next turn of a trajectory); a prompt that
shares a prefix with any slot copies it (the samples of one prompt). A prompt whose prefix is computed in the current
step waits one step instead of computing it again.
"""

from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trackway.rollout.engines.protocol import FinishReason, Generation, Piece
from trackway.rollout.engines.torch.sampler import uniforms
from trackway.wire.rollout import PromptLogprobs, SamplingParams, TopLogprobs
from trackway.wire.trajectory import WeightSpan, add_span

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

    def allocate(self, prompt: abc.Sequence[int], *, reuse: bool = True) -> SlotAllocation | None:
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

    def release(self, slot: int, tokens: abc.Sequence[int]) -> None:
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


@dataclass(eq=False)
class Sequence:
    """A prompt and its output. The first `cached` tokens have their KV in `slot`. The rest are pending."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    stops: frozenset[int]
    limit: int
    """Maximum number of output tokens: max_tokens, or what the model's length leaves."""
    on_token: Callable[[Piece], None] | None = None
    """Called with each token, on the engine's thread."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """One for each output token if asked for, else empty."""
    prompt_logprobs: PromptLogprobs | None = None
    """The scored prompt, once it is computed, if asked for."""
    spans: list[WeightSpan] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    reused: int = 0
    """Prompt tokens whose KV came from the cache."""
    uniforms: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.uniforms = uniforms(self.params.seed)

    @property
    def length(self) -> int:
        """Number of tokens, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens that the next forward pass computes: 1 while decoding."""
        return self.length - self.cached

    @property
    def awaits_score(self) -> bool:
        """Return whether the prompt is to be scored. All of it is computed then: the cache has no logits."""
        return self.params.prompt_logprobs is not None and self.prompt_logprobs is None

    @property
    def pending_ids(self) -> list[int]:
        """The ids of the pending tokens."""
        if self.output:
            return self.output[self.cached - len(self.prompt) :]
        return self.prompt[self.cached :]

    def accept(
        self, token: int, logprob: float, version: int, top_logprobs: TopLogprobs | None = None
    ) -> FinishReason | None:
        """Append a sampled token. Returns the finish reason, or None."""
        self.cached = self.length
        self.output.append(token)
        self.logprobs.append(logprob)
        tops = (top_logprobs,) if top_logprobs else ()
        scored = None if len(self.output) > 1 else self.prompt_logprobs
        self.top_logprobs += tops
        # The prompt and all tokens up to here keep the KV of the weights that computed them.
        oldest = self.spans[0].version if self.spans else version
        kv_version = oldest if oldest != version else None
        add_span(self.spans, version, len(self.output) - 1, len(self.output), kv_version)
        if self.on_token is not None:
            spans = () if kv_version is None else (self.spans[-1].model_copy(update={"start": 0, "end": 1}),)
            self.on_token(
                Piece([token], [logprob], version, top_logprobs=tops, weight_versions=spans, prompt_logprobs=scored)
            )
        if token in self.stops:
            return "stop"
        return "length" if len(self.output) >= self.limit else None

    def result(self, reason: FinishReason) -> Generation:
        """The output so far."""
        tops = tuple(self.top_logprobs)
        return Generation(self.output, self.logprobs, reason, self.spans, tops, self.reused, self.prompt_logprobs)


class Scheduler:
    """Assigns slots to waiting sequences and groups the running ones."""

    def __init__(self, slots: int, max_len: int, group_tokens: int = 1024) -> None:
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.slots = SlotTable(slots, max_len)
        self._group_tokens = group_tokens

    @property
    def busy(self) -> bool:
        """Return whether there are unfinished sequences."""
        return bool(self.waiting or self.running)

    def admit(self) -> list[SlotAllocation]:
        """Move waiting sequences into free slots, first come first served. Returns their allocations.

        A step scores a group's tokens, or one longer prompt.
        """
        allocations: list[SlotAllocation] = []
        later: deque[Sequence] = deque()
        free, unscored = self.slots.free, self._group_tokens
        while self.waiting and len(allocations) < free:
            sequence = self.waiting.popleft()
            is_late = sequence.awaits_score and unscored < min(len(sequence.prompt), self._group_tokens)
            allocation = None if is_late else self.slots.allocate(sequence.prompt, reuse=not sequence.awaits_score)
            if allocation is None:
                later.append(sequence)
                continue
            unscored -= len(sequence.prompt) * sequence.awaits_score
            sequence.slot, sequence.cached, sequence.reused = allocation.slot, allocation.cached, allocation.cached
            self.running.append(sequence)
            allocations.append(allocation)
        self.waiting.extendleft(reversed(later))
        return allocations

    def groups(self) -> list[list[Sequence]]:
        """The running sequences in groups to compute together. Those with one pending token come first.

        A prompt to score is a group.
        """
        groups: list[list[Sequence]] = []
        room = 0
        scored = [sequence for sequence in self.running if sequence.awaits_score]
        others = [sequence for sequence in self.running if not sequence.awaits_score]
        for sequence in sorted(others, key=lambda sequence: (sequence.pending > 1, sequence.slot)):
            if (sequence.pending > 1 and sequence.pending > room) or not groups:
                groups.append([])
                room = self._group_tokens
            groups[-1].append(sequence)
            room -= sequence.pending
        return [*groups, *([sequence] for sequence in scored)]

    def mark_computed(self, group: abc.Sequence[Sequence]) -> None:
        """Record that the group's pending tokens are cached. Complete prompts may be shared."""
        for sequence in group:
            if not sequence.output:
                self.slots.commit(sequence.slot, len(sequence.prompt))

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running. Its slot keeps the computed tokens."""
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.slots.release(sequence.slot, [*sequence.prompt, *sequence.output][: sequence.cached])

    def clear(self) -> list[Sequence]:
        """Remove and return all sequences, and reset the prefix cache."""
        sequences = [*self.running, *self.waiting]
        for sequence in sequences:
            self.finish(sequence)
        self.slots.reset_prefix_cache()
        return sequences
