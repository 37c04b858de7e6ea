"""Which groups are requested when, which are trained when, and that none is lost or trained twice."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest

from trackway.learner.filtering import GroupFilter
from trackway.trainer.data.dataset import Position, Prompts
from trackway.trainer.loop.group_source import GroupSource
from trackway.trainer.loop.scheduler import GroupScheduler, NextPrompt, Pacing, SchedulerState
from trackway.wire.agent import Sample
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, trajectory_id

pytestmark = pytest.mark.anyio

N = 2
FAILED = ErrorBody(code=ErrorCode.UNAVAILABLE, message="gone", retryable=True)
Name = tuple[int, int | str]
"""Step and prompt of a group."""


@dataclass
class Generation:
    """Groups that end when the test says so. Stands for `Rollouts`."""

    n: int = N
    requested: list[Name] = field(default_factory=list)
    versions: dict[Name, int] = field(default_factory=dict)
    traced: set[Name] = field(default_factory=set)
    cancelled: list[Name] = field(default_factory=list)
    _ended: dict[Name, asyncio.Event] = field(default_factory=dict)
    _error: dict[Name, ErrorBody | None] = field(default_factory=dict)
    _scores: dict[Name, Sequence[float]] = field(default_factory=dict)
    _failed: dict[Name, Collection[int]] = field(default_factory=dict)

    async def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool) -> list[Trajectory]:
        name = (step, sample.index)
        try:
            await self._ended[name].wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        scores, errors = self._scores[name], dict.fromkeys(self._failed[name], self._error[name])
        return [made(name, rollout_n, errors.get(rollout_n), scores[rollout_n]) for rollout_n in range(N)]

    def start(self, sample: Sample, step: int, min_weight_version: int, trace: bool):
        name = (step, sample.index)
        self.requested.append(name)
        self.versions[name] = min_weight_version
        self._ended[name] = asyncio.Event()
        self.traced |= {name} if trace else set()
        return self.group(sample, step, min_weight_version, trace)

    async def end(
        self,
        *names: Name,
        error: ErrorBody | None = None,
        failed: Collection[int] = range(N),
        scores: Sequence[float] = (0.0, 1.0),
    ) -> None:
        """The groups end, their rollouts `failed` with the error, and the scheduler's tasks have run."""
        for name in names:
            self._error[name], self._scores[name], self._failed[name] = error, scores, failed
            self._ended[name].set()
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def running(self) -> list[Name]:
        return [name for name in self.requested if not self._ended[name].is_set() and name not in self.cancelled]


class Requests(GroupSource):
    """`Rollouts.group` records the request when it is made, not when its task first runs."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    @property
    def n(self) -> int:
        return self._generation.n

    def group(self, sample: Sample, step: int, min_weight_version: int, trace: bool):
        return self._generation.start(sample, step, min_weight_version, trace)


def made(name: Name, rollout_n: int, error: ErrorBody | None = None, score: float = 0.0) -> Trajectory:
    step, index = name
    tags = Tags(experiment_name="e", step=step, sample_index=index, rollout_n=rollout_n)
    return Trajectory(
        id=trajectory_id("r", tags),
        session_id="s",
        tags=tags,
        agent_name="a",
        data_source="d",
        response_ids=[1],
        response_mask=[1],
        response_logprobs=[-1.0],
        reward=None if error else Reward(score=score),
        stop_reason=StopReason.ERROR if error else StopReason.ANSWERED,
        error=error,
    )


@dataclass
class Run:
    """The scheduler's part of a training loop, over rows `0, 1, 2, ...` in their order."""

    generation: Generation
    scheduler: GroupScheduler
    prompts: Prompts
    total_steps: int
    steps: int = 0
    position: Position = field(default_factory=Position)
    trained: list[list[Name]] = field(default_factory=list)

    def submit(self, choose: Callable[[int, int], frozenset[int]] = lambda number, size: frozenset()) -> None:
        version = 100 + self.scheduler.pacing.version(self.steps)
        self.scheduler.submit(self.steps, self.position, version, choose, self.total_steps - self.steps)

    async def take(self) -> list[Name]:
        async with asyncio.timeout(60):
            return names(await self.scheduler.take(self.steps, self.position))

    async def is_waiting(self) -> bool:
        taking = asyncio.create_task(self.take())
        for _ in range(5):
            await asyncio.sleep(0)
        waits = not taking.done()
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        return waits

    def used(self, groups: Sequence[Name]) -> None:
        """The learner trained them; ends the step."""
        self.scheduler.used({"used": len(groups) * N, "dropped_failed": 0, "dropped_stale": 0})
        self.trained.append(list(groups))
        self.steps += 1
        _, self.position = self.prompts.take(self.position)

    async def step(self) -> list[Name]:
        """A step in which everything that runs ends at once."""
        self.submit()
        await self.generation.end(*self.generation.running)
        groups = await self.take()
        self.used(groups)
        return groups


def difference(metric: str = "reward", **settings: int) -> GroupFilter:
    return GroupFilter(metric, **settings)


def names(trajectories: Sequence[Trajectory]) -> list[Name]:
    """The groups, in order; fails unless each is whole."""
    found = [(trajectory.tags.step, trajectory.tags.sample_index) for trajectory in trajectories]
    assert all(count == N for count in Counter(found).values())
    return list(dict.fromkeys(found))


@pytest.fixture
def begin(sample: Callable[[int], Sample]) -> Callable[..., Run]:
    """Begins a run of `rows` rows in batches of `batch_size`, with pacing and, to resume, a state."""

    def new(
        rows: int = 100,
        batch_size: int = 4,
        total_steps: int = 20,
        drop_last: bool = True,
        state: SchedulerState | None = None,
        finished: Sequence[Trajectory] = (),
        group_filter: GroupFilter | None = None,
        **pacing: float,
    ) -> Run:
        prompts = Prompts([sample(index) for index in range(rows)], batch_size, 0, shuffle=False, drop_last=drop_last)
        generation = Generation()
        paced = Pacing(batch_size=batch_size, **pacing)  # pyright: ignore[reportArgumentType]
        scheduler = GroupScheduler(
            prompts, Requests(generation), paced, state or SchedulerState(), finished, group_filter
        )
        return Run(generation, scheduler, prompts, total_steps)

    return new


async def test_without_depth_a_step_is_one_batch_and_waits_for_its_last_group(begin):
    run = begin()
    run.submit()
    await run.generation.end((1, 0), (1, 3), (1, 2))

    assert await run.is_waiting()
    await run.generation.end((1, 1))
    groups = await run.take()
    run.used(groups)
    run.submit()

    assert groups == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert run.generation.requested[4:] == [(2, 4), (2, 5), (2, 6), (2, 7)]
    assert {run.generation.versions[name] for name in groups} == {100}
    assert {run.generation.versions[name] for name in run.generation.running} == {101}


@pytest.mark.parametrize(
    ("depth", "first", "later"),
    [(0.5, [(1, index) for index in range(6)], [4, 4]), (1, [(1, index) for index in range(8)], [4, 4])],
)
async def test_generation_runs_ahead_by_the_depth(begin, depth: float, first: list[Name], later: list[int]):
    run = begin(depth=depth, bound=1)
    run.submit()
    requested = [list(run.generation.requested)]
    for _ in later:
        await run.step()
        run.submit()
        requested.append(run.generation.requested[sum(map(len, requested)) :])

    assert requested[0] == first
    assert [len(names) for names in requested[1:]] == later
    assert [{step for step, _ in names} for names in requested] == [{1}, {2}, {3}]


async def test_a_slow_group_holds_no_batch_back_until_it_would_be_too_stale(begin):
    run = begin(depth=1, bound=1)
    run.submit()
    await run.generation.end(*[(1, index) for index in range(1, 8)])
    first = await run.take()
    run.used(first)
    run.submit()

    assert first == [(1, 1), (1, 2), (1, 3), (1, 4)]
    await run.generation.end(*[(2, index) for index in range(8, 12)])
    assert await run.is_waiting()  # for (1, 0), which would be two versions old in the step after
    await run.generation.end((1, 0))
    assert await run.take() == [(1, 0), (1, 5), (1, 6), (1, 7)]


async def test_a_step_leaves_its_slowest_groups_to_later_ones_until_they_would_be_too_stale(begin):
    run = begin(over_sample=0.2, bound=2)
    run.submit()
    await run.generation.end(*[(1, index) for index in (4, 2, 0)])
    assert (run.generation.running, await run.is_waiting()) == ([(1, 1), (1, 3)], True)
    await run.generation.end((1, 3))
    run.used(await run.take())
    run.submit()
    second = [(2, index) for index in range(5, 9)]
    assert (run.generation.requested[5:], run.generation.cancelled) == (second, [])
    await run.generation.end(*second)
    run.used(await run.take())
    run.submit()
    third = [(3, index) for index in range(9, 13)]
    await run.generation.end(*third)

    assert await run.is_waiting()  # for (1, 1), which would be three versions old in the step after
    assert run.scheduler.progress() == (
        "4 of 5 groups have finished, and it takes 4 of the oldest; held by group 1/1, too stale for a later step "
        "(trackway.max_staleness)"
    )
    await run.generation.end((1, 1))
    assert await run.take() == [(1, 1), *third[:3]]
    assert run.scheduler.progress() == "5 of 5 groups have finished, and it takes 4 of the oldest"
    assert run.trained == [[(1, 0), (1, 2), (1, 3), (1, 4)], second]


async def test_a_step_counts_the_groups_that_were_begun_before_it(begin):
    run = begin(over_sample=0.2, bound=2)
    counts: list[float] = []
    for late in ([(1, 1)], [(2, 5)], []):
        run.submit()
        await run.generation.end(*[name for name in run.generation.running if name not in late])
        run.used(await run.take())
        counts.append(run.scheduler.metrics()["training/carried_over_groups"])

    assert counts == [0, 1, 1]
    assert "training/carried_over_groups" not in begin().scheduler.metrics()


@pytest.mark.parametrize(
    ("batch_size", "rate", "begun"),
    [(8, 0.2, 10), (4, 0.2, 5), (9, 0.1, 10), (14, 0.3, 20), (4, 0.5, 8), (4, 0.01, 5), (4, 0, 4), (3, 0.9, 30)],
)
async def test_a_step_ends_when_the_share_of_its_groups_is_complete(begin, batch_size: int, rate: float, begun: int):
    run = begin(batch_size=batch_size, over_sample=rate, bound=9)
    run.submit()
    await run.generation.end(*run.generation.running[: batch_size - 1])
    assert (len(run.generation.requested), await run.is_waiting()) == (begun, True)

    await run.generation.end(run.generation.running[-1])
    assert len(await run.take()) == batch_size >= (1 - rate) * begun - 1


async def test_a_resumed_run_begins_the_groups_again_that_a_step_left_to_later_ones(begin):
    run = begin(over_sample=0.2, bound=2)
    run.submit()
    await run.generation.end(*[(1, index) for index in (0, 2, 3, 4)])
    run.used(await run.take())
    state, finished = run.scheduler.snapshot()
    assert (finished, [group.place for group in state.outstanding]) == ([], [1])

    resumed = begin(over_sample=0.2, bound=2, state=state, finished=finished)
    resumed.steps, resumed.position = run.steps, run.position
    resumed.submit()
    await resumed.generation.end(*resumed.generation.running)
    groups = await resumed.take()
    resumed.used(groups)

    assert resumed.generation.requested == [(1, 1), *[(2, index) for index in range(5, 9)]]
    assert groups == [(1, 1), (2, 5), (2, 6), (2, 7)]
    assert resumed.scheduler.metrics()["training/carried_over_groups"] == 1
    account = resumed.scheduler.account()
    assert account.pop("submitted") == sum(account.values()) == 9 * N


async def test_with_drop_a_group_that_passes_the_bound_is_cancelled_and_another_takes_its_place(begin):
    run = begin(depth=1, bound=1, drop=True)
    run.submit()
    await run.generation.end(*[(1, index) for index in range(1, 8)])
    for _ in range(2):
        groups = await run.take()
        run.used(groups)
        run.submit()
        await run.generation.end(*[name for name in run.generation.running if name != (1, 0)])

    assert run.generation.cancelled == [(1, 0)]
    assert run.trained == [[(1, 1), (1, 2), (1, 3), (1, 4)], [(1, 5), (1, 6), (1, 7), (2, 8)]]
    assert run.scheduler.account()["dropped_stale"] == N
    assert run.scheduler.take_dropped().trajectories == []
    assert len(run.generation.requested) == 8 + 4 + 5


async def test_a_finished_group_that_no_step_took_in_time_is_handed_over_once(begin):
    run = begin(depth=1, bound=1, drop=True)
    run.submit()
    await run.generation.end(*run.generation.running)
    run.used(await run.take())
    run.steps = 4  # groups of step 1 may train in the first two steps only
    run.submit()

    assert names(run.scheduler.take_dropped().trajectories) == [(1, 4), (1, 5), (1, 6), (1, 7)]
    assert run.scheduler.take_dropped().trajectories == []
    assert run.scheduler.account()["dropped_stale"] == 4 * N


async def test_weights_that_are_published_every_other_step_pace_two_batches_at_once(begin):
    run = begin(sync_every=2)
    requested = [0]
    for _ in range(4):
        await run.step()
        requested.append(len(run.generation.requested))

    assert requested == [0, 8, 8, 16, 16]
    assert run.trained[1] == [(1, 4), (1, 5), (1, 6), (1, 7)]


async def test_no_group_is_requested_that_no_step_would_train(begin):
    run = begin(depth=3, bound=3, total_steps=5)
    for _ in range(5):
        await run.step()

    assert len(run.generation.requested) == 20
    assert run.scheduler.metrics() == {
        "rollouts/submitted": 40,
        "rollouts/used": 40,
        "rollouts/dropped_failed": 0,
        "rollouts/dropped_infrastructure": 0,
        "rollouts/dropped_filtered": 0,
        "rollouts/dropped_stale": 0,
        "rollouts/running": 0,
        "rollouts/finished": 0,
        "rollouts/cancelled": 0,
        "training/rollout_retries": 0,
        "training/carried_over_groups": 4,
    }


async def test_the_incomplete_batch_of_an_epoch_stays_a_step_of_its_own_size(begin):
    run = begin(rows=10, total_steps=6, drop_last=False, depth=1, bound=1)
    for _ in range(6):
        await run.step()

    assert [len(groups) for groups in run.trained] == [4, 4, 2, 4, 4, 2]
    assert Counter(index for groups in run.trained for _, index in groups) == dict.fromkeys(range(10), 2)


async def test_a_prompt_is_requested_once_in_a_step_when_rows_are_few(begin):
    run = begin(rows=4, depth=1, bound=1)
    run.submit()
    first = list(run.generation.requested)
    groups = await run.step()

    assert first == [(1, 0), (1, 1), (1, 2), (1, 3)] == groups


async def test_the_traced_places_are_chosen_once_for_each_batch(begin):
    run = begin(depth=0.5, bound=1)
    asked: list[tuple[int, int]] = []

    def choose(number: int, size: int) -> frozenset[int]:
        asked.append((number, size))
        return frozenset({1, 3})

    run.submit(choose)
    await run.generation.end(*run.generation.running)
    run.used(await run.take())
    run.submit(choose)

    assert asked == [(1, 4), (2, 4), (3, 4)]
    assert run.generation.traced == {(1, 1), (1, 3), (1, 5), (2, 7), (2, 9)}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "pacing",
    [
        {},
        {"depth": 0.3, "bound": 1},
        {"depth": 1, "bound": 1},
        {"depth": 2, "bound": 2},
        {"depth": 1.5, "bound": 2, "sync_every": 2},
        {"depth": 2, "bound": 4},
        {"over_sample": 0.2, "bound": 2},
        {"over_sample": 0.5, "bound": 1},
        {"depth": 1, "over_sample": 0.2, "bound": 3},
        {"over_sample": 0.5, "bound": 1, "sync_every": 2},
    ],
)
async def test_whatever_ends_first_all_prompts_train_once_in_time_and_the_account_is_whole(
    begin, seed: int, pacing: dict[str, float]
):
    """Trained prompts are those that were sampled, slow ones included: nothing prefers short answers."""
    chance = random.Random(seed)
    run = begin(rows=40, total_steps=10, **pacing)
    paced: Pacing = run.scheduler.pacing
    while run.steps < 10:
        run.submit()
        taking = asyncio.create_task(run.take())
        while not taking.done():
            if run.generation.running:
                await run.generation.end(chance.choice(run.generation.running))
            await asyncio.sleep(0)
            account = run.scheduler.account()
            assert account.pop("submitted") == sum(account.values()) == len(run.generation.requested) * N
        ages = [paced.version(run.steps) - paced.version(step - 1) for step, _ in taking.result()]
        assert max(ages) <= paced.bound
        run.used(taking.result())

    assert Counter(index for groups in run.trained for _, index in groups) == dict.fromkeys(range(40), 1)


async def test_a_resumed_run_has_what_was_finished_and_requests_what_was_not(begin):
    run = begin(depth=1, bound=1)
    run.submit()
    await run.generation.end(*[(1, index) for index in (0, 2, 3, 5)])
    run.used(await run.take())
    await run.generation.end((1, 7))
    await run.generation.end((1, 6), error=FAILED, failed=[1])
    state, finished = run.scheduler.snapshot()
    await run.scheduler.close()

    again = begin(
        depth=1, bound=1, state=SchedulerState.model_validate_json(state.model_dump_json()), finished=finished
    )
    again.steps, again.position = run.steps, run.position
    kept, before = again.scheduler.snapshot(), again.scheduler.account()
    again.submit()
    await again.generation.end(*again.generation.running)

    stopped = run.scheduler.account()
    assert run.generation.cancelled == [(1, 1), (1, 4)]
    assert stopped.pop("submitted") == sum(stopped.values()) == 8 * N
    assert (stopped["used"], stopped["finished"], stopped["cancelled"]) == (4 * N, 2 * N, 2 * N)
    assert before == stopped | {
        "submitted": 8 * N,
        "finished": N,
        "cancelled": 3 * N,
    }  # a group with a failed rollout is not kept
    assert kept == (state, finished)
    assert again.generation.requested == [(1, 1), (1, 4), (1, 6), *((2, index) for index in range(8, 12))]
    assert await again.take() == [(1, 1), (1, 4), (1, 6), (1, 7)]
    assert again.scheduler.metrics()["rollouts/submitted"] == 12 * N


async def test_what_a_closed_scheduler_cancelled_is_still_outstanding_in_a_checkpoint(begin):
    run = begin()
    run.submit()
    await run.generation.end((1, 2))
    await run.scheduler.close()

    state, finished = run.scheduler.snapshot()

    assert [group.place for group in state.outstanding] == [0, 1, 2, 3]
    assert names(finished) == [(1, 2)]
    assert state.next_prompt == NextPrompt(position=Position(batch=1), batch=2)


SAME = (1.0, 1.0)


async def test_a_group_without_a_difference_is_left_out_at_once_and_the_next_prompt_takes_its_place(begin):
    run = begin(group_filter=difference())
    run.submit()
    await run.generation.end((1, 0), (1, 2))
    await run.generation.end((1, 1), scores=SAME)
    taking = asyncio.create_task(run.take())
    await asyncio.sleep(0)
    replaced = list(run.generation.requested)
    await run.generation.end((1, 4), scores=(0.0, 0.0))
    await run.generation.end((1, 3), (1, 5))
    groups = await taking
    run.used(groups)
    dropped = run.scheduler.take_dropped()

    assert replaced == [(1, index) for index in range(5)]
    assert groups == [(1, 0), (1, 2), (1, 3), (1, 5)]
    assert run.generation.requested == [(1, index) for index in range(6)]
    assert names(dropped.trajectories) == [(1, 1), (1, 4)]
    assert {status.feedback for status in dropped.statuses} == {"dropped_filtered"}
    metrics = run.scheduler.metrics()
    assert [metrics[f"rollouts/{state}"] for state in ("submitted", "used", "dropped_filtered")] == [12, 8, 4]
    assert metrics["training/filter_groups/evicted_samples"] == 2
    assert metrics["training/filter_groups/generated_samples"] == 6
    assert (await run.step(), run.scheduler.metrics()["training/filter_groups/evicted_samples"]) == (
        [(2, 6), (2, 7), (2, 8), (2, 9)],
        0,
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("at_once", [1, 3, 8])
async def test_what_a_filtered_step_trains_does_not_depend_on_what_ends_first(begin, seed: int, at_once: int):
    chance = random.Random(seed)
    run = begin(group_filter=difference(at_once=at_once), total_steps=3)
    while run.steps < 3:
        run.submit()
        taking = asyncio.create_task(run.take())
        while not taking.done():
            if run.generation.running:
                name = chance.choice(run.generation.running)
                await run.generation.end(name, scores=SAME if name[1] % 3 else (0.0, 1.0))
            await asyncio.sleep(0)
            account = run.scheduler.account()
            assert account.pop("submitted") == sum(account.values()) == len(run.generation.requested) * N
        run.used(taking.result())

    expected = {
        1: [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27, 30, 33]],
        3: [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27, 30, 33]],
        8: [[0, 3, 6, 9], [18, 21, 24, 27], [33, 36, 39, 42]],
    }
    assert [[index for _, index in groups] for groups in run.trained] == expected[at_once]


async def test_what_a_synchronous_step_has_too_many_of_is_discarded_and_counted(begin):
    run = begin(group_filter=difference(at_once=8))
    run.submit()
    await run.generation.end(*run.generation.running)
    run.used(await run.take())
    dropped = run.scheduler.take_dropped()

    assert run.trained == [[(1, 0), (1, 1), (1, 2), (1, 3)]]
    assert names(dropped.trajectories) == [(1, 4), (1, 5), (1, 6), (1, 7)]
    assert {status.feedback for status in dropped.statuses} == {"dropped_stale"}
    assert run.scheduler.metrics()["training/filter_groups/discarded_surplus_samples"] == 4
    assert run.scheduler.account()["dropped_stale"] == 4 * N


async def test_generation_ahead_of_the_learner_keeps_its_depth_and_its_surplus(begin):
    run = begin(group_filter=difference(at_once=4), depth=0.5, bound=1)
    run.submit()
    await run.generation.end((1, 0), (1, 1), scores=SAME)
    await run.generation.end(*run.generation.running)
    groups = await run.take()
    run.used(groups)
    run.submit()

    assert groups == [(1, 2), (1, 3), (1, 4), (1, 5)]
    assert run.generation.requested == [(1, index) for index in range(8)] + [(2, index) for index in range(8, 12)]
    assert (run.scheduler.account()["finished"], run.scheduler.account()["running"]) == (2 * N, 4 * N)


async def test_a_step_that_would_take_more_prompts_than_it_may_fails_with_the_remedy(begin):
    run = begin(group_filter=difference(max_prompts=6))
    run.submit()
    await run.generation.end((1, 0), (1, 1), scores=SAME)
    assert await run.is_waiting()
    await run.generation.end((1, 4), scores=SAME)

    with pytest.raises(TrackwayError, match=r"3 were left out, and 6 prompts may be taken.*max_num_gen_batches"):
        await run.take()
    assert len(run.generation.requested) == 6


async def test_groups_generated_for_later_steps_do_not_count_as_prompts_of_this_step(begin):
    run = begin(group_filter=difference(max_prompts=8), depth=1, bound=1)
    run.submit()
    await run.generation.end(*((1, index) for index in range(4)), scores=SAME)
    assert await run.is_waiting()
    await run.generation.end(*((1, index) for index in range(8, 12)), scores=SAME)
    assert await run.is_waiting()
    await run.generation.end(*((1, index) for index in range(4, 8)))

    assert await run.take() == [(1, 4), (1, 5), (1, 6), (1, 7)]


async def test_a_step_ahead_of_whose_own_prompts_too_few_differ_fails(begin):
    run = begin(group_filter=difference(max_prompts=8), depth=1, bound=1)
    run.submit()
    await run.generation.end(*((1, index) for index in range(4)), scores=SAME)
    assert await run.is_waiting()
    await run.generation.end((1, 7), scores=SAME)

    with pytest.raises(TrackwayError, match=r"5 were left out, and 8 prompts may be taken"):
        await run.take()


async def test_what_was_left_out_ahead_counts_in_the_step_of_its_prompts(begin):
    run = begin(group_filter=difference(max_prompts=6), depth=1, bound=1)
    run.submit()
    await run.generation.end(*((1, index) for index in (1, 5, 6)), scores=SAME)
    await run.generation.end(*((1, index) for index in (0, 2, 3, 4)))
    run.used(await run.take())
    evicted = run.scheduler.metrics()["training/filter_groups/evicted_samples"]
    run.submit()
    assert await run.is_waiting()
    await run.generation.end((1, 7), scores=SAME)

    assert (run.trained, evicted) == ([[(1, 0), (1, 2), (1, 3), (1, 4)]], 1)
    with pytest.raises(TrackwayError, match=r"3 were left out, and 6 prompts may be taken"):
        await run.take()


async def test_a_step_that_took_every_row_fails_instead_of_waiting(begin):
    run = begin(rows=8, group_filter=difference())
    run.submit()
    await run.generation.end(*run.generation.running, scores=SAME)
    assert await run.is_waiting()
    await run.generation.end(*run.generation.running, scores=SAME)

    with pytest.raises(TrackwayError, match=r"8 were left out, and every row was taken.*train_batch_size"):
        await run.take()
    assert run.generation.requested == [(1, index) for index in range(8)]


async def test_a_failed_rollout_has_no_value_and_a_group_with_one_value_is_kept(begin):
    run = begin(group_filter=difference())
    run.submit()
    await run.generation.end((1, 0), error=FAILED, scores=SAME)
    await run.generation.end((1, 1), (1, 2), (1, 3))

    assert await run.take() == [(1, 0), (1, 1), (1, 2), (1, 3)]


async def test_a_filtered_step_resumes_with_what_it_left_out(begin):
    run = begin(rows=8, group_filter=difference(max_prompts=7))
    run.submit()
    await run.generation.end((1, 0), (1, 1), scores=SAME)
    await run.generation.end((1, 2))
    assert await run.is_waiting()
    state, finished = run.scheduler.snapshot()
    await run.scheduler.close()

    state = SchedulerState.model_validate_json(state.model_dump_json())
    again = begin(rows=8, group_filter=difference(max_prompts=7), state=state, finished=finished)
    again.submit()
    requested = list(again.generation.requested)
    await again.generation.end((1, 3), scores=SAME)
    assert await again.is_waiting()
    await again.generation.end((1, 4), (1, 5), (1, 6))

    assert requested == [(1, 3), (1, 4), (1, 5)]
    assert await again.take() == [(1, 2), (1, 4), (1, 5), (1, 6)]
    account = again.scheduler.account()
    assert (account["submitted"], account["dropped_filtered"]) == (7 * N, 3 * N)
