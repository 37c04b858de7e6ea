"""Decides which groups are generated ahead of the learner, and which it trains next.

    submitted -> running -> finished -> used, or dropped: failed, by infrastructure, filtered, stale
                        \\-> dropped as stale. Cancelled, until a resumed run submits it again

A group is the rollouts of one prompt. Groups are submitted in the order of the data, as far ahead of the learner as
`depth` allows. Pacing bounds how stale they get, so that nothing is generated in vain: with a depth of S versions, at
most (S + version + 1) batches are submitted before version + 1 is published (AReaL, arXiv:2505.24298;
`areal/infra/staleness_manager.py`).

The learner takes finished groups, oldest first. A slow group does not hold a batch back until it would become too
stale; then the learner waits for it, or drops it if asked to. So each submitted group trains once, and short answers
are not preferred. With depth 0 the learner waits for all groups of a batch: the synchronous loop. With `over_sample` a
step has more groups in flight than it trains, and its slowest ones go on into later steps within the same bound.

With a filter, a finished group without a difference is left out and the next prompt takes its place. What a synchronous
step trains depends on the order of the prompts and on their rewards, never on which group ended first.
"""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pydantic import BaseModel, Field

from trackway.learner.filtering import FilteredBatch, GroupFilter, TrainStatus
from trackway.trainer.data.dataset import Position, PromptBatches
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.metrics import Metrics
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

ChooseTraced: TypeAlias = Callable[[int, int], frozenset[int]]
"""(number of a batch, its size) -> the places in the batch whose rollouts are traced."""


@dataclass(frozen=True)
class Pacing:
    """How far generation may run ahead of the learner. A version is `sync_every` updates."""

    batch_size: int = 1
    """Prompts of a whole batch."""
    depth: float = 0.0
    """Versions that generation is meant to be ahead, fractions allowed. 0 is the synchronous loop."""
    bound: int = 0
    """Most versions between a group's submission and its training; at least `depth`."""
    drop: bool = False
    """Drop a group that passes the bound, instead of waiting for it before it does."""
    sync_every: int = 1
    """Updates between two publications of the weights."""
    over_sample: float = 0.0
    """Share of the groups in flight that a step leaves to later ones, below 1."""

    @property
    def runs_ahead(self) -> bool:
        """Return whether rollouts may go on while the learner computes."""
        return self.depth > 0 or self.sync_every > 1 or self.over_sample > 0

    def version(self, steps: int) -> int:
        """Publications after the first one, when so many updates are done."""
        return steps // self.sync_every

    def ahead(self, steps: int) -> int:
        """Groups that may be outstanding beyond the batch that trains next."""
        rest = self.sync_every - 1 - steps % self.sync_every
        left_over = self.batch_size * self.over_sample / (1 - self.over_sample)
        return math.floor((rest + self.depth * self.sync_every) * self.batch_size) + math.ceil(round(left_over, 6))


class SubmittedGroup(BaseModel):
    """A group that was submitted and has not been trained."""

    position: Position
    """The batch of the data that its prompt is from."""
    place: int
    """Its prompt's place in that batch."""
    step: int
    """The step that was next at its submission: the tag `step` of its trajectories."""
    traced: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """Place of its prompt in the order of the data."""
        return self.position.epoch, self.position.batch, self.place


class NextPrompt(BaseModel):
    """The prompt that is submitted next."""

    position: Position
    place: int = 0
    batch: int = 1
    """Number of its batch, which is the step that trains it in the synchronous loop."""


class Account(BaseModel):
    """Rollouts by their end. The counts after `submitted` and the outstanding rollouts sum to it."""

    submitted: int = 0
    used: int = 0
    """Trained."""
    dropped_failed: int = 0
    dropped_infrastructure: int = 0
    dropped_filtered: int = 0
    dropped_stale: int = 0
    baseline: int = 0
    """Greedy rollouts of which only the score is used."""

    def add(self, counts: Mapping[str, int]) -> None:
        """Add rollouts by state."""
        for state, count in counts.items():
            setattr(self, state, getattr(self, state) + count)


class SchedulerState(BaseModel):
    """The scheduler's part of a checkpoint."""

    next_prompt: NextPrompt | None = None
    """None: the first prompt of the batch that trains next."""
    outstanding: list[SubmittedGroup] = Field(default_factory=list)
    account: Account = Field(default_factory=Account)
    retries: int = 0
    """Rollouts that were requested again after a broken stream."""
    left_out: list[SubmittedGroup] = Field(default_factory=list[SubmittedGroup])
    """Groups that the filter left out since the last update, also for later prompts than it trained."""
    drawn: list[str] = Field(default_factory=list[str])
    """Sessions that cannot be drawn again, where a run trains on sessions."""


@dataclass(eq=False)
class _Outstanding:
    group: SubmittedGroup
    rollouts: asyncio.Future[list[Trajectory]]
    kept: bool = False
    """True if the filter has seen it, and keeps it."""

    @property
    def state(self) -> Literal["running", "finished", "cancelled"]:
        """`finished` when all its rollouts have ended."""
        if not self.rollouts.done():
            return "running"
        return "cancelled" if self.rollouts.cancelled() else "finished"

    @property
    def finished(self) -> bool:
        """Return whether all its rollouts have ended. Not when they were cancelled."""
        return self.state == "finished"


@dataclass(frozen=True)
class _Submission:
    """The arguments of `submit`, for the groups that replace others until the next call."""

    steps: int
    position: Position
    version: int
    choose_traced: ChooseTraced
    steps_left: int


@dataclass
class GroupScheduler:
    """The groups between the data and the learner.

    A step that fails has no effect: what `take` returned stays outstanding until `used` is called. With a checkpoint's
    `state` its outstanding groups are requested again, except those whose trajectories are in `finished`.
    """

    prompts: PromptBatches
    rollouts: GroupSource
    pacing: Pacing = field(default_factory=Pacing)
    state: SchedulerState = field(default_factory=SchedulerState)
    finished: Sequence[Trajectory] = ()
    filter: GroupFilter | None = None
    """Leaves out groups without a difference; None trains all."""
    _submission: _Submission | None = None
    _outstanding: list[_Outstanding] = field(default_factory=list)
    _taken: list[_Outstanding] = field(default_factory=list)
    _dropped: list[FilteredBatch] = field(default_factory=list[FilteredBatch])
    _filtered: Metrics = field(default_factory=dict)
    """Effect of the filter on the newest update."""
    _needed: int = 0
    _held_by: list[_Outstanding] = field(default_factory=list[_Outstanding])
    """Running groups without which the next update may not begin, once enough others have finished."""
    _carried_over: int = 0
    """Groups of the newest update that were submitted before its step began."""
    _traced: tuple[int, frozenset[int]] = (0, frozenset())

    def submit(
        self, steps: int, position: Position, version: int, choose_traced: ChooseTraced, steps_left: int
    ) -> None:
        """Submit the groups that pacing allows, to be sampled from weights `version` or newer.

        Args:
            steps: updates done.
            position: the batch that trains next.
            version: the newest published weights.
            choose_traced: called once for each batch.
            steps_left: updates to come. No group is submitted that none of them would train.
        """
        self._resume(version)
        if self.pacing.drop or self.filter is not None:
            self._drop_stale(steps)
        self._submission = _Submission(steps, position, version, choose_traced, steps_left)
        self._leave_out()
        self._fill(self._submission)

    def _fill(self, submission: _Submission) -> None:
        """Submit the groups that pacing allows."""
        steps = submission.steps
        prompt = self.state.next_prompt or NextPrompt(position=submission.position, batch=steps + 1)
        names = {self._name(outstanding.group) for outstanding in self._outstanding}
        names |= {self._name(group) for group in self.state.left_out}
        missing = self._allowed(steps, submission.position, submission.steps_left) - len(self._outstanding)
        if self.filter is not None:
            missing = math.ceil(missing / self.filter.at_once) * self.filter.at_once
        after_newest, repeated = prompt, 0
        while missing > 0:
            batch, after = self.prompts.take(prompt.position)
            traced = prompt.place in self._traced_places(prompt.batch, len(batch), submission.choose_traced)
            group = SubmittedGroup(position=prompt.position, place=prompt.place, step=steps + 1, traced=traced)
            is_new = self._name(group) not in names
            # Few rows: the prompt is already in this step, and a trajectory's id is its step and its prompt.
            if not is_new and (self.filter is None or repeated >= 2 * self.prompts.steps_per_epoch * len(batch)):
                break
            if prompt.place + 1 < len(batch):
                prompt = prompt.model_copy(update={"place": prompt.place + 1})
            else:
                prompt = NextPrompt(position=after, batch=prompt.batch + 1)
            if not is_new:
                repeated += 1
                continue
            names.add(self._name(group))
            self._outstanding.append(self._start(group, submission.version))
            self.state.account.submitted += self.rollouts.n
            missing, after_newest, repeated = missing - 1, prompt, 0
        self.state.next_prompt = after_newest

    async def take(self, steps: int, position: Position) -> list[Trajectory]:
        """All rollouts of the groups that the next update trains, failed ones included, in the order of submission.

        These are the oldest finished groups, as many as the batch at `position` has. Returns once there are so many,
        and once enough old ones are among them for the others to be trained within the bound.
        """
        self._needed = size = len(self.prompts.take(position)[0])
        while True:
            self._leave_out()
            finished = [group for group in self._outstanding if group.finished]
            is_enough = self._is_enough(len(finished), size)
            self._held_by = self._running_late(steps, position, size) if is_enough else []
            if is_enough and not self._held_by:
                break
            self._replace(size)
            running = [group.rollouts for group in self._outstanding if not group.finished]
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        self._taken = finished[:size]
        self._carried_over = sum(taken.group.step <= steps for taken in self._taken)
        return [trajectory for group in self._taken for trajectory in group.rollouts.result()]

    def _is_enough(self, finished: int, size: int) -> bool:
        if self.filter is None:
            return finished >= min(size, len(self._outstanding))
        return finished >= size and (self.pacing.runs_ahead or finished == len(self._outstanding))

    def _leave_out(self) -> None:
        """Hand over the finished groups that the filter leaves out."""
        if self.filter is None:
            return
        for outstanding in [group for group in self._outstanding if group.finished and not group.kept]:
            left_out = self.filter.sift(outstanding.rollouts.result())
            outstanding.kept = left_out is None
            if left_out is not None:
                self._outstanding.remove(outstanding)
                self.state.left_out.append(outstanding.group)
                self.state.account.add(left_out.counts)
                self._dropped.append(left_out)

    def _replace(self, size: int) -> None:
        """Submit groups in the place of those that were left out. Raises TrackwayError when there may be no more."""
        if self.filter is None or self._submission is None:
            return
        most = self.filter.max_prompts
        if most is not None and self._left_out_of_the_oldest(most) > most - size:
            remedy = "raise algorithm.filter_groups.max_num_gen_batches, or set it to 0 for no limit"
            raise self._too_few(size, f"{most} prompts may be taken", remedy)
        self._fill(self._submission)
        if all(group.finished for group in self._outstanding):
            raise self._too_few(size, "every row was taken", "lower data.train_batch_size")

    def _left_out_of_the_oldest(self, count: int) -> int:
        """Return how many of the oldest `count` prompts since the last update were left out, for later steps."""
        prompts = [(group, True) for group in self.state.left_out]
        prompts += [(outstanding.group, False) for outstanding in self._outstanding]
        prompts.sort(key=lambda prompt: prompt[0].order)
        return sum(is_left_out for _, is_left_out in prompts[:count])

    def _too_few(self, size: int, limit: str, remedy: str) -> TrackwayError:
        name = "" if self.filter is None else self.filter.metric
        message = (
            f"expected {size} groups whose rollouts differ in {name!r} (algorithm.filter_groups), got "
            f"{len(self._outstanding)}; {len(self.state.left_out)} were left out, and {limit} for one step; the rows "
            f"are too easy or too hard for the model: take others, or {remedy}"
        )
        return TrackwayError(ErrorCode.INVALID_REQUEST, message)

    def used(self, counts: Mapping[str, int]) -> None:
        """The groups taken last are done. `counts` are their trajectories by `fate`."""
        self._outstanding = [group for group in self._outstanding if group not in self._taken]
        stale = self.rollouts.take_stale()
        self.state.account.add({**counts, "submitted": len(stale)})
        self.state.account.dropped_stale += len(stale)
        self._dropped.append(FilteredBatch(stale, [TrainStatus.STALE] * len(stale)))
        if self.filter is not None:
            self._end_filtered_step()
        self._taken = []

    def _end_filtered_step(self) -> None:
        surplus = [] if self.pacing.runs_ahead else self._outstanding
        self._drop(surplus)
        newest = max(outstanding.group.order for outstanding in self._taken)
        of_later_steps = [group for group in self.state.left_out if self.pacing.runs_ahead and group.order > newest]
        evicted = len(self.state.left_out) - len(of_later_steps)
        self.state.left_out = of_later_steps
        self._filtered = {
            "training/filter_groups/evicted_samples": float(evicted),
            "training/filter_groups/discarded_surplus_samples": float(len(surplus)),
            "training/filter_groups/generated_samples": float(len(self._taken) + evicted + len(surplus)),
        }

    def take_dropped(self) -> FilteredBatch:
        """End of the trajectories of finished groups that no step took, since the last call."""
        dropped, self._dropped = self._dropped, []
        trajectories = [trajectory for batch in dropped for trajectory in batch.trajectories]
        return FilteredBatch(trajectories, [status for batch in dropped for status in batch.statuses])

    def snapshot(self) -> tuple[SchedulerState, list[Trajectory]]:
        """For a checkpoint: the state, and the trajectories of the groups that finished without an error."""
        finished = [group.rollouts.result() for group in self._outstanding if group.finished]
        whole = [group for group in finished if all(trajectory.error is None for trajectory in group)]
        outstanding = [*self.state.outstanding, *(group.group for group in self._outstanding)]
        again = {trajectory.session_id for group in finished if group not in whole for trajectory in group}
        drawn = [session_id for session_id in self.rollouts.drawn() if session_id not in again]
        changes = {"outstanding": outstanding, "retries": self.retries, "drawn": drawn}
        state = self.state.model_copy(update=changes, deep=True)
        return state, [*self.finished, *(trajectory for group in whole for trajectory in group)]

    @property
    def retries(self) -> int:
        """Rollouts of the run that were requested again after a broken stream."""
        return self.state.retries + self.rollouts.retries

    def account(self) -> dict[str, int]:
        """The rollouts by state; those after `submitted` sum to it.

        `running`, `finished` and `cancelled` are the outstanding ones. A run that stops cancels what is running, and
        submits it again when it is resumed.
        """
        outstanding = Counter(group.state for group in self._outstanding)
        waiting = {state: outstanding[state] * self.rollouts.n for state in ("running", "finished", "cancelled")}
        waiting["cancelled"] += len(self.state.outstanding) * self.rollouts.n - len(self.finished)
        waiting["finished"] += len(self.finished)
        account = self.state.account.model_dump() | waiting
        return {state: count for state, count in account.items() if state != "baseline" or count}

    def metrics(self) -> Metrics:
        """The account as `rollouts/<state>`, the retries, and what the filter did, in prompts, under verl's names.

        Where rollouts run ahead, also how many groups of the newest update were begun before its step.
        """
        metrics = {f"rollouts/{state}": float(count) for state, count in self.account().items()}
        metrics["training/rollout_retries"] = float(self.retries)
        if self.pacing.runs_ahead:
            metrics["training/carried_over_groups"] = float(self._carried_over)
        return metrics | self._filtered

    def progress(self) -> str:
        """Return how many groups have finished, how many the next update takes, and which one alone holds it."""
        finished = sum(group.finished for group in self._outstanding)
        left_out = f"; {len(self.state.left_out)} were left out for others" if self.state.left_out else ""
        needed = f"it takes {self._needed} of the oldest"
        return f"{finished} of {len(self._outstanding)} groups have finished, and {needed}{left_out}{self._held()}"

    def _held(self) -> str:
        if not self._held_by:
            return ""
        step, index = self._name(self._held_by[0].group)
        others = f" and {len(self._held_by) - 1} more" if len(self._held_by) > 1 else ""
        return f"; held by group {step}/{index}{others}, too stale for a later step (trackway.max_staleness)"

    async def close(self) -> None:
        """Cancel the requests that are still running."""
        running = [group.rollouts for group in self._outstanding]
        for request in running:
            request.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _allowed(self, steps: int, position: Position, steps_left: int) -> int:
        batch, position = self.prompts.take(position)
        total, most = len(batch), len(batch) + self.pacing.ahead(steps)
        for _ in range(steps_left - 1):
            if total >= most:
                break
            batch, position = self.prompts.take(position)
            total += len(batch)
        return min(total, most)

    def _start(self, group: SubmittedGroup, version: int) -> _Outstanding:
        sample = self.prompts.take(group.position)[0][group.place]
        request = self.rollouts.group(sample, group.step, version, group.traced)
        return _Outstanding(group, asyncio.create_task(request))

    def _resume(self, version: int) -> None:
        """Bring back the outstanding groups of a checkpoint."""
        finished: defaultdict[tuple[int, int | str], list[Trajectory]] = defaultdict(list)
        for trajectory in self.finished:
            finished[trajectory.tags.step, trajectory.tags.sample_index].append(trajectory)
        for group in self.state.outstanding:
            trajectories = finished.get(self._name(group))
            if trajectories is None:
                self._outstanding.append(self._start(group, version))
            else:
                result: asyncio.Future[list[Trajectory]] = asyncio.get_running_loop().create_future()
                result.set_result(trajectories)
                self._outstanding.append(_Outstanding(group, result))
        self.state.outstanding, self.finished = [], ()

    def _drop_stale(self, steps: int) -> None:
        """Cancel and forget the groups that are too stale for the next update."""
        self._drop([group for group in self._outstanding if self._last_update(group) < steps])

    def _drop(self, stale: Sequence[_Outstanding]) -> None:
        for group in stale:
            if group.finished:
                trajectories = group.rollouts.result()
                self._dropped.append(FilteredBatch(trajectories, [TrainStatus.STALE] * len(trajectories)))
            group.rollouts.cancel()
        self._outstanding = [group for group in self._outstanding if group not in stale]
        self.state.account.dropped_stale += len(stale) * self.rollouts.n

    def _running_late(self, steps: int, position: Position, size: int) -> list[_Outstanding]:
        """The running groups of which some could not train in time if the oldest finished ones were trained now.

        Empty if, for every later update, the groups that must be trained by then fit the batches up to then.
        """
        if self.pacing.drop:
            return []
        last_updates = [self._last_update(group) for group in self._outstanding]
        update, room = steps, 0
        for last in sorted(set(last_updates)):
            while update < last:
                _, position = self.prompts.take(position)
                room += len(self.prompts.take(position)[0])
                update += 1
            needed = min(size, sum(other <= last for other in last_updates) - room)
            due = [group for group in self._outstanding if self._last_update(group) <= last]
            if sum(group.finished for group in due) < needed:
                return [group for group in due if not group.finished]
        return []

    def _last_update(self, outstanding: _Outstanding) -> int:
        """The last update that may train the group, counted from 0."""
        version = self.pacing.version(outstanding.group.step - 1)
        return (version + self.pacing.bound + 1) * self.pacing.sync_every - 1

    def _name(self, group: SubmittedGroup) -> tuple[int, int | str]:
        return group.step, self.prompts.take(group.position)[0][group.place].index

    def _traced_places(self, number: int, size: int, choose: ChooseTraced) -> frozenset[int]:
        if self._traced[0] != number:
            self._traced = number, choose(number, size)
        return self._traced[1]
