"""Continuous batching: sequences join when a slot is free, run in groups of similar length, and leave when finished."""

from collections import abc, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trackway.rollout.engines.protocol import FinishReason, Generation, Piece
from trackway.rollout.engines.torch.sampler import uniforms
from trackway.rollout.engines.torch.slots import SlotAllocation, SlotTable
from trackway.wire.rollout import PromptLogprobs, SamplingParams, TopLogprobs
from trackway.wire.trajectory import WeightSpan, add_span


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
        """Whether the prompt is to be scored. All of it is computed then: the cache has no logits."""
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
        """Whether there are unfinished sequences."""
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
