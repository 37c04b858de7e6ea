"""A run over sessions of a deployed agent: which make a group, which are dropped, and that each trains once."""

import asyncio
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.services.trainer.run_state.test_session_inbox import RUN, Finished, finished
from tests.waiting import async_until
from trackway.run_config import RunConfig
from trackway.trainer.data.dataset import Position
from trackway.trainer.loop import session_groups
from trackway.trainer.loop.from_config import training_template
from trackway.trainer.loop.scheduler import GroupScheduler, Pacing, SchedulerState
from trackway.trainer.loop.session_groups import SessionGroups, SessionLimits, SessionSlots
from trackway.trainer.run_state.session_inbox import SessionInbox
from trackway.trainer.traces.run import training_feedback
from trackway.wire.errors import ErrorCode
from trackway.wire.trajectory import TraceTarget, Trajectory, WeightSpan

pytestmark = pytest.mark.anyio

__all__ = ["finished"]  # the fixture

CONFIG = RunConfig().with_values({"actor_rollout_ref.rollout.n": 2, "data.max_response_length": 99})
TEMPLATE = training_template(CONFIG, "run-a", TraceTarget())
LIMITS = SessionLimits(timeout_s=5.0, max_age_s=60.0, max_waiting=64)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_groups, "POLL_S", 0.002)


def groups_of(folder: Path, trained: list[str] | None = None, **limits: float) -> SessionGroups:
    chosen = SessionLimits(**{**vars(LIMITS), **limits})  # pyright: ignore[reportArgumentType]
    return SessionGroups(SessionInbox(folder), TEMPLATE, chosen, trained or [])


def put(folder: Path, *sessions: object) -> None:
    for session in sessions:
        SessionInbox(folder).put(session)  # pyright: ignore[reportArgumentType]


async def drawn(groups: SessionGroups, place: int = 0, step: int = 1, version: int = 0) -> list[Trajectory]:
    [sample] = SessionSlots(1, 10).take(Position(batch=place))[0]
    return await groups.group(sample, step, version, trace=False)


async def test_the_sessions_of_a_group_become_the_rollouts_of_a_place(tmp_path: Path, finished: Finished) -> None:
    groups = groups_of(tmp_path)
    put(tmp_path, finished(0, "a"), finished(1, 7), finished(2, "b"), finished(3, 7), finished(4, "a"))

    first, second = await drawn(groups, place=3, step=2), await drawn(groups, place=4, step=2)

    assert [(t.id, t.session_id[-1], t.reward and t.reward.score) for t in (*first, *second)] == [
        ("run-a/2/3/0", "1", 1.0),
        ("run-a/2/3/1", "3", 3.0),
        ("run-a/2/4/0", "0", 0.0),
        ("run-a/2/4/1", "4", 4.0),
    ]
    assert [session.group for session in SessionInbox(tmp_path).waiting()] == ["b"]


async def test_what_the_run_fixes_for_its_sessions_has_no_seed(tmp_path: Path) -> None:
    groups_of(tmp_path)

    fixed = SessionInbox(tmp_path).opened()

    assert (fixed.most, fixed.run.run, fixed.run.sampling_params.seed) == (64, RUN.run, None)
    assert (fixed.run.limits.max_response_length, fixed.run.sampling_params.max_tokens) == (99, 99)


async def test_new_sessions_are_sampled_from_the_newest_weights_and_the_first_ones_from_the_runs_own(
    tmp_path: Path, finished: Finished
) -> None:
    groups = SessionGroups(SessionInbox(tmp_path), TEMPLATE, LIMITS, first_version=4)
    before = SessionInbox(tmp_path).opened().run.min_weight_version
    put(tmp_path, finished(0), finished(1))
    await drawn(groups, version=6)

    assert (before, SessionInbox(tmp_path).opened().run.min_weight_version) == (4, 6)


def test_sessions_ask_the_policy_of_their_run(tmp_path: Path) -> None:
    SessionGroups(SessionInbox(tmp_path), replace(TEMPLATE, policy="run-a"), LIMITS)

    assert SessionInbox(tmp_path).opened().run.policy == "run-a"


async def test_a_session_that_comes_again_after_a_checkpoint_is_not_trained_again(
    tmp_path: Path, finished: Finished
) -> None:
    groups = groups_of(tmp_path, timeout_s=0.1)
    put(tmp_path, finished(0), finished(1))
    first = await drawn(groups)
    groups.saved(groups.drawn())
    put(tmp_path, finished(0), finished(1))

    again = await drawn(groups)

    assert [trajectory.error for trajectory in first] == [None, None]
    assert {error.code for trajectory in again if (error := trajectory.error)} == {ErrorCode.DEADLINE_EXCEEDED}
    assert SessionInbox(tmp_path).waiting() == []


async def test_old_sessions_are_dropped_by_versions_and_by_seconds_counted_and_named_on_their_traces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, finished: Finished
) -> None:
    def sampled_from(version: int) -> dict[str, object]:
        return {"weight_versions": [WeightSpan(version=version, start=0, end=2)], "trace_id": f"t{version}"}

    groups = groups_of(tmp_path, max_staleness=2)
    scheduler = GroupScheduler(SessionSlots(1, 1), groups)
    put(tmp_path, *(finished(number, "g", **sampled_from(6 + number)) for number in range(4)), finished(4, "g"))
    long_ago = time.time() - 61
    os.utime(tmp_path / "sessions" / "waiting" / f"{finished(2).session_id}.json", (long_ago, long_ago))

    ahead = time.time() + 3600
    monkeypatch.setattr(time, "time", lambda: ahead)  # files are dated by another clock

    scheduler.submit(0, Position(), 9, lambda number, size: frozenset(), 1)
    group = await scheduler.take(0, Position())
    scheduler.used({"used": len(group)})

    assert [trajectory.session_id[-1] for trajectory in group] == ["1", "3"]
    assert [session_id[-1] for session_id in groups.drawn()] == ["2", "0", "1", "3"]
    account = {state: count for state, count in scheduler.account().items() if count}
    assert account == {"submitted": 4, "used": 2, "dropped_stale": 2}
    feedback = training_feedback(scheduler.take_dropped(), [])
    assert {told.trace_id: told.values for told in feedback} == {
        "t6": {"reward": 0.0, "fate": "dropped_stale"},
        "t8": {"reward": 2.0, "fate": "dropped_stale"},
    }


async def test_a_group_that_does_not_come_in_time_fails_and_says_what_waits(tmp_path: Path, finished: Finished) -> None:
    groups = groups_of(tmp_path, timeout_s=0.05)
    put(tmp_path, finished(0, "a"), finished(1, "b"))

    group = await drawn(groups)

    errors = [trajectory.error for trajectory in group]
    assert [error and error.code for error in errors] == [ErrorCode.DEADLINE_EXCEEDED] * 2
    assert errors[0] is not None and "got: 2 sessions of 2 groups wait, at most 1 of one; see that" in errors[0].message
    assert groups.drawn() == []


async def test_a_run_that_waits_says_for_what(tmp_path: Path, finished: Finished) -> None:
    groups = groups_of(tmp_path)
    put(tmp_path, finished(0, "a"))
    waiting = asyncio.create_task(drawn(groups, step=4))
    await async_until(lambda: any(wait.progress.startswith("1") for wait in groups.waits.current()))
    waits = groups.waits.current()
    put(tmp_path, finished(1, "a"))
    await waiting

    assert [(wait.who, wait.waits_for, wait.progress) for wait in waits] == [
        (
            "group 4/0",
            "2 sessions of one group, which the agent has ended",
            "1 sessions of 1 groups wait, at most 1 of one",
        )
    ]


@pytest.mark.parametrize("seed", range(4))
async def test_whenever_a_run_is_killed_each_session_trains_once(tmp_path: Path, finished: Finished, seed: int) -> None:
    chance, steps, batch = random.Random(seed), 6, 2
    sessions = [finished(number, number // 2) for number in range(2 * batch * steps)]
    chance.shuffle(sessions)
    slots, pacing = SessionSlots(batch, steps), Pacing(batch, depth=1.0, bound=1)
    saved: tuple[int, list[str], SchedulerState, list[Trajectory]] = (0, [], SchedulerState(), [])
    kills = 3
    while True:
        step, trained, state, whole = saved[0], [*saved[1]], saved[2].model_copy(deep=True), saved[3]
        groups = groups_of(tmp_path, state.drawn)
        scheduler = GroupScheduler(slots, groups, pacing, state, whole)
        put(tmp_path, *sessions[: 2 * batch * (step + 2)])  # those that were trained are put again, as by a late retry
        killed_at = chance.randrange(step, steps + 1) if kills else steps
        kills -= 1
        while step < killed_at:
            put(tmp_path, *sessions)
            position = Position(batch=step)
            scheduler.submit(step, position, step, lambda number, size: frozenset(), steps - step)
            async with asyncio.timeout(60):
                taken = await scheduler.take(step, position)
            scheduler.used({"used": len(taken)})
            trained += [trajectory.session_id for trajectory in taken]
            step += 1
            if chance.random() < 0.5 or step == steps:
                state, whole = scheduler.snapshot()
                saved = (step, [*trained], state, whole)
                if chance.random() < 0.5:  # else it is killed before the files are removed
                    groups.saved(state.drawn)
                elif kills > 0:
                    break
        account = scheduler.account()
        assert account["submitted"] == sum(count for name, count in account.items() if name != "submitted")
        await scheduler.close()
        if step == steps:
            break

    assert sorted(trained) == sorted(session.session_id for session in sessions)
