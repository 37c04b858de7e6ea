"""The life cycle of tool instances: table of transitions, ids, maximum number, idle limit.

    CREATING -created-> IDLE <-begin/end-> BUSY        (calls of one instance run one after another)
       `-release-> RELEASED <-release- IDLE            (also when the creation failed or the idle limit passed)
    BUSY -hang-> STUCK -release-> RELEASED             (its call was cancelled but still runs; released when it ends)

This module only keeps state and calls no tool. An id is `<replica>-<start>-<uuid>`: an unknown id with the prefix of
another replica, or of this one before a restart, is lost. With the current prefix it was released or expired.
"""

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from trackway.tools.base import BaseTool
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import InstanceInfo

Clock = Callable[[], float]

SHARE = 3
"""A run holds at most this many times the instances that are left, so that other runs find places."""


class State(StrEnum):
    """The state of an instance."""

    CREATING = "creating"
    IDLE = "idle"
    BUSY = "busy"
    STUCK = "stuck"
    RELEASED = "released"


class Event(StrEnum):
    """An event that changes an instance's state."""

    CREATED = "created"
    BEGIN = "begin"
    END = "end"
    HANG = "hang"
    RELEASE = "release"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.CREATING, Event.CREATED): State.IDLE,
    (State.CREATING, Event.RELEASE): State.RELEASED,
    (State.IDLE, Event.BEGIN): State.BUSY,
    (State.BUSY, Event.END): State.IDLE,
    (State.BUSY, Event.HANG): State.STUCK,
    (State.STUCK, Event.RELEASE): State.RELEASED,
    (State.IDLE, Event.RELEASE): State.RELEASED,
}
"""The allowed transitions. Any other is an error."""


@dataclass
class Instance:
    """A tool's state for a trajectory."""

    id: str
    tool: BaseTool
    session_id: str | None
    run: str
    """The run that its calls count for. Empty for callers without a trajectory's id."""
    made_at: float
    used_at: float
    state: State = State.CREATING
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def move(self, event: Event) -> None:
        """Apply a transition. CONFLICT when it is not allowed."""
        step = TRANSITIONS.get((self.state, event))
        if step is None:
            raise TrackwayError(
                ErrorCode.CONFLICT,
                f"instance {self.id}: expected a state from which {event.value!r} leads on, got {self.state.value!r}",
            )
        self.state = step


class InstanceTable:
    """The instances of this replica.

    replica: name of this process, 4 to 32 letters and digits.
    max_instances: maximum number of instances; beyond it OVERLOADED. A run holds at most SHARE times those left.
    ttl_s: seconds without a call after which an instance expires.
    clock: monotonic seconds.
    """

    def __init__(self, replica: str, max_instances: int, ttl_s: float, clock: Clock = time.monotonic) -> None:
        # A replica may be named by its operator and restart under the same name, without its instances.
        self.prefix = f"{replica}-{uuid.uuid4().hex[:8]}"
        self._max_instances = max_instances
        self._ttl_s = ttl_s
        self._clock = clock
        self._instances: dict[str, Instance] = {}
        self._held = Counter[str]()
        """Number of instances by run."""
        self._sessions: dict[str, dict[str, Instance]] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def has_room(self, run: str) -> bool:
        """Return whether the run may have another instance."""
        return self._held[run] < SHARE * (self._max_instances - len(self._instances))

    def add(self, tool: BaseTool, session_id: str | None, run: str = "") -> Instance:
        """Add an instance in state CREATING. OVERLOADED without room."""
        if not self.has_room(run):
            raise TrackwayError(
                ErrorCode.OVERLOADED,
                f"expected fewer than {self._max_instances} tool instances on this replica, and of a run fewer than "
                f"{SHARE} times those left, got {len(self._instances)}, {self._held[run]} of them of this run; "
                "release instances, wait for idle ones to expire, or raise max_instances",
            )
        now = self._clock()
        instance = Instance(f"{self.prefix}-{uuid.uuid4().hex}", tool, session_id, run, made_at=now, used_at=now)
        self._instances[instance.id] = instance
        self._held[run] += 1
        if session_id is not None:
            self._sessions.setdefault(session_id, {})[instance.id] = instance
        return instance

    def created(self, instance: Instance) -> None:
        """Record that the tool has created the state: calls may begin, and the idle time counts."""
        instance.used_at = self._clock()
        instance.move(Event.CREATED)

    def get(self, instance_id: str) -> Instance:
        """The instance of an id.

        INSTANCE_LOST for another replica's id and for one whose call is stuck, INSTANCE_NOT_FOUND for any other.
        """
        instance = self._instances.get(instance_id)
        if instance is None:
            raise self._absent(instance_id)
        self._require_usable(instance)
        return instance

    def of_session(self, session_id: str) -> list[Instance]:
        """The instances of a trajectory, oldest first."""
        return list(self._sessions.get(session_id, {}).values())

    @asynccontextmanager
    async def held(self, instance: Instance, wait_timeout_s: float) -> AsyncIterator[Instance]:
        """BUSY within the block. Waits for the previous call. OVERLOADED when that takes too long."""
        async with acquired(instance.lock, wait_timeout_s, f"instance {instance.id}"):
            self._require_usable(instance)
            instance.move(Event.BEGIN)
            try:
                yield instance
            finally:
                instance.used_at = self._clock()
                if instance.state is State.BUSY:
                    instance.move(Event.END)

    async def retire(self, instance: Instance, wait_timeout_s: float) -> None:
        """Remove an instance after its current call. INSTANCE_NOT_FOUND if it was removed already."""
        async with acquired(instance.lock, wait_timeout_s, f"instance {instance.id}"):
            self._require_usable(instance)
            self.strike(instance)

    def strike(self, instance: Instance) -> None:
        """Remove an instance at once. It must not be in a call."""
        instance.move(Event.RELEASE)
        del self._instances[instance.id]
        self._held[instance.run] -= 1
        if not self._held[instance.run]:
            del self._held[instance.run]
        if instance.session_id is not None:
            session = self._sessions[instance.session_id]
            del session[instance.id]
            if not session:
                del self._sessions[instance.session_id]

    def take_expired(self) -> list[Instance]:
        """Remove and return the instances without a call for longer than the idle limit.

        Atomic, so that no call can begin on an expiring instance.
        """
        horizon = self._clock() - self._ttl_s
        idle = [
            instance
            for instance in self._instances.values()
            if instance.state is State.IDLE and instance.used_at < horizon
        ]
        for instance in idle:
            self.strike(instance)
        return idle

    def everything(self) -> list[Instance]:
        """All instances, oldest first."""
        return list(self._instances.values())

    def info(self, instance: Instance) -> InstanceInfo:
        """An instance without its content, for operators."""
        now = self._clock()
        return InstanceInfo(
            instance_id=instance.id,
            tool=instance.tool.name,
            session_id=instance.session_id,
            state=instance.state.value,
            age_s=now - instance.made_at,
            idle_s=0.0 if instance.state is State.BUSY else now - instance.used_at,
        )

    def _require_usable(self, instance: Instance) -> None:
        if instance.state is State.RELEASED:
            raise self._absent(instance.id)
        if instance.state is State.STUCK:
            raise TrackwayError(
                ErrorCode.INSTANCE_LOST,
                f"expected a usable instance, got {instance.id}, whose last call does not stop; it is released when it "
                "does; create the instance again and replay its calls",
                tool=instance.tool.name,
            )

    def _absent(self, instance_id: str) -> TrackwayError:
        well_formed = re.fullmatch("[0-9a-z]{4,32}-[0-9a-f]{8}-[0-9a-f]{32}", instance_id) is not None
        if well_formed and not instance_id.startswith(f"{self.prefix}-"):
            return TrackwayError(
                ErrorCode.INSTANCE_LOST,
                f"expected an instance of replica {self.prefix}, got {instance_id}, made by another replica; "
                "send x-session-id with every call, or create the instance again and replay its calls",
            )
        return TrackwayError(
            ErrorCode.INSTANCE_NOT_FOUND,
            f"expected a living instance, got {instance_id!r}: never made here, released, or idle for more than "
            f"{self._ttl_s:g} s; POST /instances makes a new one",
        )


@asynccontextmanager
async def acquired(place: asyncio.Lock, wait_timeout_s: float, what: str) -> AsyncIterator[None]:
    """Hold a lock. OVERLOADED when it is not free within `wait_timeout_s` seconds."""
    await free_within(wait_timeout_s, place.acquire(), what)
    try:
        yield
    finally:
        place.release()


async def free_within(wait_timeout_s: float, acquired: Awaitable[object], what: str) -> None:
    """Wait until a lock or a slot is acquired. OVERLOADED when that takes more than `wait_timeout_s` seconds."""
    try:
        async with asyncio.timeout(wait_timeout_s):
            await acquired
    except TimeoutError as error:
        message = f"{what}: expected a free place within {wait_timeout_s:g} s; ask again later, or add replicas"
        raise TrackwayError(ErrorCode.OVERLOADED, message) from error
