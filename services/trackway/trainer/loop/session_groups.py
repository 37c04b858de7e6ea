"""Groups of sessions that a deployed agent has ended, instead of rollouts of rows.

The scheduler asks for a group as it does for one of a row, and gets the next n sessions of one group that have ended.
Sessions that waited too long, or whose oldest token is too many versions behind, are dropped before.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trackway.learner.filtering import OverlongPenalty
from trackway.learner.measuring import ActiveTime
from trackway.system import StorageError
from trackway.trainer.data.dataset import Position
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.rollout_client import GroupTemplate, checked
from trackway.trainer.run_state.session_inbox import OpenInbox, SessionInbox, WaitingSession
from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import FinishedSession, SessionRun
from trackway.wire.trajectory import Tags, Trajectory, trajectory_id

POLL_S = 0.2
"""Interval between looks into the inbox."""
_REMEMBERED = 10_000
"""Trained sessions that are not taken again, should an agent service repeat an old call."""


class SessionSlots:
    """Batches of places for groups: the prompts of a run that has no rows. Each place has a number of its own."""

    def __init__(self, batch_size: int, total_steps: int) -> None:
        self.steps_per_epoch = total_steps
        self._batch_size = batch_size

    def take(self, position: Position) -> tuple[list[Sample], Position]:
        """The places of a batch, and the position after it."""
        number = position.epoch * self.steps_per_epoch + position.batch
        places = range(number * self._batch_size, (number + 1) * self._batch_size)
        epoch, batch = divmod(number + 1, self.steps_per_epoch)
        return [_place(place) for place in places], Position(epoch=epoch, batch=batch)


def _place(number: int) -> Sample:
    return Sample(
        data_source="sessions",
        prompt=[Message(role="user", content="")],
        reward_model=RewardModel(ground_truth=""),
        extra_info={"index": number},
    )


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of the sessions that wait."""

    timeout_s: float
    """Longest wait for a group."""
    max_age_s: float
    max_waiting: int
    max_staleness: int | None = None
    """Most versions that the oldest token may be behind when the session is drawn."""


class SessionGroups(GroupSource):
    """Draws groups from the run's inbox, in the order in which they become complete."""

    def __init__(
        self,
        inbox: SessionInbox,
        template: GroupTemplate,
        limits: SessionLimits,
        trained: Sequence[str] = (),
        active: ActiveTime | None = None,
        overlong: OverlongPenalty | None = None,
        first_version: int = 0,
    ) -> None:
        """`trained`: the sessions that the checkpoint has; `first_version`: what the run publishes first."""
        super().__init__(active)
        self._inbox, self._template, self._limits, self._overlong = inbox, template, limits, overlong
        self._trained = dict.fromkeys(trained)
        self._drawn: list[str] = []
        self._turn = asyncio.Lock()
        self._stale: list[Trajectory] = []
        self._version = 0
        self._waiting: Sequence[WaitingSession] = ()
        self._open = OpenInbox(run=_fixed(template, first_version), most=limits.max_waiting)
        inbox.open(self._open, set(trained))

    @property
    def n(self) -> int:
        """Sessions of each group."""
        return self._template.n

    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        """The next n sessions of one group, as rollouts of the place `sample`.

        Failed rollouts when no group is complete within the time limit. `min_weight_version` is the newest version.
        """
        self._version = max(self._version, min_weight_version)
        request, limit_s = self._template.group(sample, step, min_weight_version, trace), self._limits.timeout_s
        name, awaited = f"group {step}/{sample.index}", f"{self.n} sessions of one group, which the agent has ended"
        sessions: Sequence[FinishedSession] = ()
        with self.active(), self.waits(name, awaited, limit_s) as waiting, suppress(TimeoutError):
            waiting.progress = self._progress
            async with asyncio.timeout(limit_s), self._turn:
                while True:
                    with suppress(StorageError):  # the run itself waits for its disk, and says so
                        await asyncio.to_thread(self._announce)
                        sessions = await self._complete()
                    if sessions:
                        break  # no further await: a cancellation now would lose them until the run is resumed
                    await asyncio.sleep(POLL_S)
        if not sessions:
            message = f"expected {awaited}, within {limit_s:g} s (trackway.group_timeout_s), got: {self._progress()}"
            remedy = "see that the agent ends its sessions, and that as many have the same train.group"
            error = TrackwayError(ErrorCode.DEADLINE_EXCEEDED, f"{message}; {remedy}")
            return [request.failed(rollout_n, error) for rollout_n in range(self.n)]
        return [self._named(session, request.tags(rollout_n)) for rollout_n, session in enumerate(sessions)]

    def _named(self, session: FinishedSession, tags: Tags) -> Trajectory:
        changes = {"id": trajectory_id(self._template.run, tags), "session_id": session.session_id, "tags": tags}
        trajectory = checked(session.trajectory.model_copy(update=changes))
        return self._overlong.applied(trajectory) if self._overlong else trajectory

    def _announce(self) -> None:
        """Let new sessions be sampled from the newest weights."""
        if self._version > self._open.run.min_weight_version:
            run = self._open.run.model_copy(update={"min_weight_version": self._version})
            self._inbox.announce(announced := self._open.model_copy(update={"run": run}))
            self._open = announced

    async def _complete(self) -> list[FinishedSession]:
        """The n sessions of a complete group, which are drawn. Empty while there is none."""
        found = await asyncio.to_thread(self._inbox.waiting)
        self._inbox.remove([session.session_id for session in found if session.session_id in self._trained])
        waiting = [session for session in found if session.session_id not in self._trained]
        now_s = await asyncio.to_thread(self._inbox.now_s)
        stale = [session.session_id for session in waiting if self._is_old(session, now_s)]
        self._stale += [session.trajectory for session in self._draw(stale)]
        self._waiting = [session for session in waiting if session.session_id not in stale]
        groups: defaultdict[int | str, list[str]] = defaultdict(list)
        for session in self._waiting:
            members = groups[session.group]
            members.append(session.session_id)
            if len(members) == self.n:
                return self._draw(members)
        return []

    def _draw(self, sessions: Sequence[str]) -> list[FinishedSession]:
        drawn = self._inbox.draw(sessions)
        self._drawn += sessions
        return drawn

    def _is_old(self, session: WaitingSession, now_s: float) -> bool:
        most, oldest = self._limits.max_staleness, session.oldest_version
        is_behind = most is not None and oldest is not None and self._version - oldest > most
        return is_behind or now_s - session.since_s > self._limits.max_age_s

    def _progress(self) -> str:
        sizes = Counter(session.group for session in self._waiting)
        return f"{sizes.total()} sessions of {len(sizes)} groups wait, at most {max(sizes.values(), default=0)} of one"

    def take_stale(self) -> list[Trajectory]:
        """Sessions that were dropped as too old, since the last call."""
        stale, self._stale = self._stale, []
        return stale

    def drawn(self) -> list[str]:
        """The sessions that were drawn or dropped, and the ones of earlier checkpoints that are remembered."""
        return [*self._trained, *self._drawn]

    def saved(self, drawn: Collection[str]) -> None:
        """Remove the files of sessions that a checkpoint has."""
        saved = set(drawn).intersection(self._drawn)
        self._inbox.remove(saved)
        trained = [*self._trained, *(session_id for session_id in self._drawn if session_id in saved)]
        self._trained = dict.fromkeys(trained[-_REMEMBERED:])
        self._drawn = [session_id for session_id in self._drawn if session_id not in saved]


def _fixed(template: GroupTemplate, first_version: int) -> SessionRun:
    """Settings that the run fixes for its sessions. No seed, which would be the same for all of a group."""
    return SessionRun(
        run=template.run,
        experiment_name=template.experiment_name,
        sampling_params=template.sampling_params.model_copy(update={"seed": None}),
        limits=template.limits,
        policy=template.policy,
        min_weight_version=first_version,
        trace_target=template.trace_target,
    )
