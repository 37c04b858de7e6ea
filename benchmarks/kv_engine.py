"""A model of a replica's engine in virtual time: KV blocks, prefix cache, continuous batching, preemption.

It answers questions about many replicas without any: tens of thousands of calls in a second of one core, and the same
result for the same seed. `SimEngine` (sim_engine.py) is for load tests, where services and clients are real.

The scheduler is vLLM's (V1). A step continues every running sequence by one token, and computes prompts with the rest
of `max_num_batched_tokens`, first come first served. A prompt is admitted when its blocks fit. Without a free block the
sequence that was admitted last is preempted, and computed again later. Blocks of ended calls stay as a prefix cache, of
which the least recently used are evicted, the end of a sequence before its beginning.

The duration of a step is linear in five quantities (`Work`), whose costs are fitted in fit_costs.py. Steps in which
nothing else happens are taken together, so that a call costs the model a few events and not one for each token.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK = 16
"""Tokens of a KV block, vLLM's default on a GPU."""


class Work(NamedTuple):
    """Quantities whose costs make up the duration of steps; or those costs, in seconds."""

    steps: float = 0.0
    decoded: float = 0.0
    """Tokens generated, one for each sequence of a step."""
    read: float = 0.0
    """Tokens of context that decoding attended to."""
    prefilled: float = 0.0
    """Prompt tokens computed."""
    attended: float = 0.0
    """Tokens of context that prompt tokens attended to."""

    def seconds(self, costs: "Work") -> float:
        """The duration of this work at these costs."""
        steps, decoded, read, prefilled, attended = costs
        return (
            self.steps * steps
            + self.decoded * decoded
            + self.read * read
            + self.prefilled * prefilled
            + self.attended * attended
        )


@dataclass(frozen=True)
class Hardware:
    """A replica: the costs of its steps in seconds, and its bounds."""

    costs: Work
    blocks: int
    """KV blocks for running sequences and the prefix cache."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block: int = BLOCK


H100 = Hardware(Work(5e-3, 1.55e-5, 1.45e-8, 1.32e-5, 1.56e-9), 1_000_000 // BLOCK)
"""Llama 3.1 8B in FP8 on one H100, as published for TensorRT-LLM 1.0 (`fit_costs.py h100`)."""
CPU = Hardware(Work(4.95e-3, 2.06e-4, 1.42e-6, 3.49e-5, 1.79e-7), 1024, 32, 512, 128)
"""A Qwen3 of 5 million parameters in vLLM 0.32 on two cores of a CPU (`fit_costs.py cpu`)."""


@dataclass(eq=False)
class Call:
    """One generation of a trajectory, whose prompt is the group's and what the trajectory has said and seen."""

    trajectory: Hashable
    group: Hashable
    group_tokens: int
    """Tokens at the beginning of the prompt that all trajectories of the group share."""
    prompt: int
    """Tokens, the group's included."""
    output: int
    """Tokens that it generates."""
    made: int = 0
    """Tokens generated when it was last admitted; computed again with the prompt after a preemption."""
    cached: int = 0
    """Prompt tokens found in the cache at the first admission."""
    admitted: bool = False
    left: int = 0
    """Prompt tokens still to compute."""
    started: int = 0
    """Step at which it began to decode, less the tokens generated before."""
    decoding: bool = False
    blocks: int = 0
    """Blocks that it holds beyond the group's."""


@dataclass
class Shared:
    """Blocks of a group's prompt that running calls hold."""

    users: int
    blocks: int


@dataclass
class Engine:
    """One replica. `add` and `step` keep its clock; `next_at` is the end of the steps that it is taking."""

    hardware: Hardware
    now: float = 0.0
    next_at: float = math.inf
    work: Work = field(default_factory=Work)
    reused: int = 0
    """Prompt tokens found in the cache."""
    preempted: int = 0
    waiting: deque[Call] = field(default_factory=deque)
    running: "OrderedDict[Call, None]" = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._step = 0
        self._ends: list[tuple[int, int, Call]] = []
        self._order = 0
        self._decoding = 0
        self._context = 0
        self._phases = [0] * self.hardware.block
        self._prefilling: list[Call] = []
        self._chunks: list[tuple[Call, int]] = []
        self._planned = 0
        self._empty = self.hardware.blocks
        self._idle: OrderedDict[Hashable, int] = OrderedDict()
        self._idle_blocks = 0
        self._held: dict[Hashable, Shared] = {}

    @property
    def free(self) -> int:
        """Blocks that no running call holds."""
        return self._empty + self._idle_blocks

    @property
    def load(self) -> int:
        """Calls that run or wait."""
        return len(self.running) + len(self.waiting)

    def generated(self, call: Call) -> int:
        """Tokens of a call so far."""
        return self._step - call.started if call.decoding else call.made

    def cached(self, call: Call) -> int:
        """Prompt tokens of a call that are in the cache, leaving at least one to compute."""
        group_blocks = call.group_tokens // self.hardware.block
        held = self._held.get(call.group)
        found = held.blocks if held else self._idle.get(("group", call.group), 0)
        if found == group_blocks:
            found += self._idle.get(call.trajectory, 0)
        return min(found * self.hardware.block, call.prompt + call.made - 1)

    def add(self, call: Call, now: float) -> None:
        """Take a call. A step in progress ends first."""
        blocked = bool(self.waiting)
        self.waiting.append(call)
        if self.next_at == math.inf:
            self.now = max(self.now, now)
            self._plan()
        elif not blocked and self._planned > 1:
            self._cut(now)

    def start(self) -> None:
        """Plan steps for the calls that wait."""
        self._plan()

    def step(self) -> list[Call]:
        """Take the planned steps, and plan the next. Returns the calls that ended."""
        ended = self._take()
        self._plan()
        return ended

    # Steps

    def _plan(self) -> None:
        """Admit calls and set `next_at`."""
        self._admit()
        while True:
            if self._prefilling:
                self._plan_prefill()
                if self._needed(1) <= self.free:
                    self._planned = 1
                    self.next_at = self.now + self._duration(1)
                    return
            elif self._decoding:
                self._planned = self._affordable(self._ends[0][0] - self._step)
                if self._planned:
                    self.next_at = self.now + self._duration(self._planned)
                    return
            else:
                self.next_at = math.inf
                self._planned = 0
                if self.waiting:
                    call = self.waiting[0]
                    raise ValueError(
                        f"expected a KV cache that holds a prompt of {call.prompt} tokens, got a smaller one"
                    )
                return
            self._preempt()  # and admit none in this step, as vLLM

    def _plan_prefill(self) -> None:
        budget = max(1, self.hardware.max_num_batched_tokens - self._decoding)
        self._chunks = []
        for call in self._prefilling:
            chunk = min(budget, call.left)
            if chunk <= 0:
                break
            self._chunks.append((call, chunk))
            budget -= chunk

    def _work(self, steps: int) -> Work:
        batch = self._decoding
        prefilled = attended = 0
        for call, chunk in self._chunks if self._prefilling else ():
            prefilled += chunk
            before = call.prompt + call.made - call.left
            attended += chunk * before + chunk * (chunk + 1) // 2
        read = steps * self._context + batch * steps * (steps - 1) // 2
        return Work(steps, batch * steps, read, prefilled, attended)

    def _duration(self, steps: int) -> float:
        return self._work(steps).seconds(self.hardware.costs)

    def _cut(self, now: float) -> None:
        """Shorten planned decoding to the first step that ends after `now`."""
        costs, batch = self.hardware.costs, self._decoding
        first = costs.steps + costs.decoded * batch + costs.read * self._context
        growth = costs.read * batch / 2
        span = now - self.now
        if growth > 0:
            linear = first - growth
            steps = (math.sqrt(linear * linear + 4 * growth * max(0.0, span)) - linear) / (2 * growth)
        else:
            steps = span / first
        self._planned = max(1, min(self._planned, math.ceil(steps)))
        self.next_at = self.now + self._duration(self._planned)

    def _take(self) -> list[Call]:
        steps = self._planned
        done = self._work(steps)
        self.work = Work(*(total + part for total, part in zip(self.work, done, strict=True)))
        self._allocate(self._needed(steps))
        self._step += steps
        self._context += self._decoding * steps
        self.now = self.next_at
        if self._prefilling:
            for call, chunk in self._chunks:
                call.left -= chunk
                if call.left == 0:
                    self._start_decoding(call)
            self._prefilling = [call for call in self._prefilling if call.left]
        ended: list[Call] = []
        while self._ends and self._ends[0][0] <= self._step:
            end, _, call = heapq.heappop(self._ends)
            if call.decoding and call.started + call.output == end:  # else it was preempted since
                self._stop_decoding(call)
                call.made = call.output
                del self.running[call]
                self._release(call, call.prompt + call.output - 1)
                ended.append(call)
        return ended

    def _start_decoding(self, call: Call) -> None:
        """The step that computed the end of the prompt made a token, too."""
        call.made += 1
        call.started = self._step - call.made
        call.decoding = True
        self._decoding += 1
        self._context += call.prompt + call.made
        self._phases[(call.prompt + call.made - 1 - self._step) % self.hardware.block] += 1
        self._order += 1
        heapq.heappush(self._ends, (call.started + call.output, self._order, call))

    def _stop_decoding(self, call: Call) -> None:
        length = call.prompt + self._step - call.started
        self._decoding -= 1
        self._context -= length
        self._phases[(length - 1 - self._step) % self.hardware.block] -= 1
        call.blocks = math.ceil((length - 1) / self.hardware.block) - call.group_tokens // self.hardware.block
        call.decoding = False

    # Blocks

    def _needed(self, steps: int) -> int:
        """Blocks that decoding takes in so many steps: one where a sequence grows over a multiple of the block."""
        block = self.hardware.block
        rounds, rest = divmod(steps, block)
        needed = rounds * self._decoding
        for offset in range(rest):
            needed += self._phases[-(self._step + offset) % block]
        return needed

    def _affordable(self, steps: int) -> int:
        """The most steps up to `steps` for which blocks are free."""
        if self._needed(steps) <= self.free:
            return steps
        least, most = 0, steps
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if self._needed(middle) <= self.free else (least, middle)
        return least

    def _admit(self) -> None:
        hardware = self.hardware
        budget = hardware.max_num_batched_tokens - self._decoding - sum(call.left for call in self._prefilling)
        while self.waiting and len(self.running) < hardware.max_num_seqs and budget > 0:
            call = self.waiting[0]
            length = call.prompt + call.made
            cached = self.cached(call)
            group_blocks = call.group_tokens // hardware.block
            held = self._held.get(call.group)
            group_idle = 0 if held else self._idle.get(("group", call.group), 0)
            own_idle = self._idle.get(call.trajectory, 0) if cached > group_blocks * hardware.block else 0
            own = math.ceil(length / hardware.block) - group_blocks
            new = own - own_idle + (0 if held else group_blocks - group_idle)
            if new > self.free - group_idle - own_idle:
                return
            self.waiting.popleft()
            if not held:
                self._take_idle(("group", call.group))
                self._held[call.group] = Shared(1, group_blocks)
            else:
                held.users += 1
            if own_idle:
                self._take_idle(call.trajectory)
            self._allocate(new)
            call.blocks, call.left = own, length - cached
            if not call.admitted:
                call.admitted, call.cached = True, cached
                self.reused += cached
            self.running[call] = None
            self._prefilling.append(call)
            budget -= call.left

    def _allocate(self, blocks: int) -> None:
        """Take free blocks: empty ones, then the least recently used of the cache."""
        taken = min(blocks, self._empty)
        self._empty -= taken
        blocks -= taken
        while blocks:
            key, idle = next(iter(self._idle.items()))
            taken = min(blocks, idle)
            self._idle_blocks -= taken
            blocks -= taken
            if taken == idle:
                del self._idle[key]
            else:
                self._idle[key] = idle - taken

    def _take_idle(self, key: Hashable) -> None:
        self._idle_blocks -= self._idle.pop(key, 0)

    def _release(self, call: Call, computed: int) -> None:
        """Give back the blocks of a call. Full ones with computed tokens stay cached."""
        group_blocks = call.group_tokens // self.hardware.block
        full = max(0, computed // self.hardware.block - group_blocks)
        self._cache(call.trajectory, min(full, call.blocks))
        self._empty += call.blocks - min(full, call.blocks)
        shared = self._held[call.group]
        shared.users -= 1
        if not shared.users:
            del self._held[call.group]
            self._cache(("group", call.group), shared.blocks)

    def _cache(self, key: Hashable, blocks: int) -> None:
        before = self._idle.pop(key, 0)  # of a trajectory that left and came back while its old blocks were held
        self._idle_blocks -= before
        self._empty += before
        if blocks:
            self._idle[key] = blocks
            self._idle_blocks += blocks

    def _preempt(self) -> None:
        """Make room: the call that was admitted last waits again, first in the queue."""
        call, _ = self.running.popitem()
        self.preempted += 1
        computed = call.prompt + call.made - call.left
        if call.decoding:
            call.made = self.generated(call)
            self._stop_decoding(call)
            computed = call.prompt + call.made - 1
        else:
            self._prefilling.remove(call)
        self._release(call, computed)
        call.left = 0
        self.waiting.appendleft(call)


def run_offline(engine: Engine, calls: Iterable[Call]) -> None:
    """Run calls that all wait from the beginning, until the last one ends."""
    engine.waiting.extend(calls)
    engine.start()
    while engine.next_at < math.inf:
        engine.step()
