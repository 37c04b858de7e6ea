"""Continuous batching: requests join when a slot is free, run in groups of like length, and leave when they end."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from trackway.rollout.engines.protocol import FinishReason, Generation, Piece
from trackway.rollout.engines.torch.sampler import uniforms
from trackway.rollout.engines.torch.slots import Place, SlotTable
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import WeightSpan, add_span


@dataclass(eq=False)
class Continuation:
    """One prompt being continued. The first `cached` of its tokens have their KV in `slot`; the rest are pending."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    stops: frozenset[int]
    limit: int
    """Most tokens it may generate: max_tokens, or what the model's length leaves."""
    hear: Callable[[Piece], None] | None = None
    """Told each token as it is made, on the engine's thread."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    draws: Iterator[float] = field(init=False)

    def __post_init__(self) -> None:
        self.draws = uniforms(self.params.seed)

    @property
    def length(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def pending(self) -> int:
        """Tokens that the next forward computes: 1 while decoding."""
        return self.length - self.cached

    @property
    def pending_ids(self) -> list[int]:
        """Their ids."""
        if self.output:
            return self.output[self.cached - len(self.prompt) :]
        return self.prompt[self.cached :]

    def accept(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Append a sampled token; returns why the continuation ends with it, or None."""
        self.cached = self.length
        self.output.append(token)
        self.logprobs.append(logprob)
        add_span(self.spans, version, len(self.output) - 1, len(self.output))
        if self.hear is not None:
            self.hear(Piece([token], [logprob], version))
        if token in self.stops:
            return "stop"
        return "length" if len(self.output) >= self.limit else None

    def result(self, reason: FinishReason) -> Generation:
        """What has been generated."""
        return Generation(self.output, self.logprobs, reason, self.spans)


class Scheduler:
    """Who waits, who runs, and in which slot."""

    def __init__(self, slots: int, max_len: int, group_tokens: int = 1024) -> None:
        self.waiting: deque[Continuation] = deque()
        self.running: list[Continuation] = []
        self.slots = SlotTable(slots, max_len)
        self._group_tokens = group_tokens

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.waiting or self.running)

    def admit(self) -> list[Place]:
        """Move waiting requests into free slots, in order of arrival; returns where each one's cached tokens lie."""
        places: list[Place] = []
        later: deque[Continuation] = deque()
        free = self.slots.free
        while self.waiting and len(places) < free:
            request = self.waiting.popleft()
            place = self.slots.place(request.prompt)
            if place is None:
                later.append(request)
                continue
            request.slot, request.cached = place.slot, place.cached
            self.running.append(request)
            places.append(place)
        self.waiting.extendleft(reversed(later))
        return places

    def groups(self) -> list[list[Continuation]]:
        """The running requests in groups to be computed together; those with one pending token come first."""
        groups: list[list[Continuation]] = []
        room = 0
        for request in sorted(self.running, key=lambda request: (request.pending > 1, request.slot)):
            if (request.pending > 1 and request.pending > room) or not groups:
                groups.append([])
                room = self._group_tokens
            groups[-1].append(request)
            room -= request.pending
        return groups

    def computed(self, group: Sequence[Continuation]) -> None:
        """The group's pending tokens are in the cache; prompts that ended their prefill may be shared."""
        for request in group:
            if not request.output:
                self.slots.commit(request.slot, len(request.prompt))

    def leave(self, request: Continuation) -> None:
        """Take a request out, wherever it is; its slot keeps what was computed."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self.slots.release(request.slot, [*request.prompt, *request.output][: request.cached])

    def clear(self) -> list[Continuation]:
        """Take everyone out and forget what the slots hold; returns who was there."""
        everyone = [*self.running, *self.waiting]
        for request in everyone:
            self.leave(request)
        self.slots.forget()
        return everyone
