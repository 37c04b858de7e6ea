"""A run whose learner has two ranks, with real processes, a scripted agent over a socket, and a random tiny model."""

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.trainer.real_runs import STEPS, ended, held_at, pid_of, run_request, urls
from tests.waiting import async_until
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def runs(agent_url: str, agent, tmp_path: Path) -> AsyncIterator[RunManager]:
    runs = RunManager(tmp_path / "outputs", urls(agent_url, tmp_path), stop_deadline_s=60)
    yield runs
    agent.released.set()
    await runs.close()


def ranks_of(pid: int) -> list[int]:
    """The processes that a run's process has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in children for child in file.read_text().split()]


def ranks_left_by(pids: set[int]) -> list[list[bytes]]:
    """The command lines of ranks that these processes have started and that still run."""
    commands: list[list[bytes]] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            commands.append(path.read_bytes().rstrip(b"\0").split(b"\0"))
    parents = {str(pid).encode() for pid in pids}
    return [line for line in commands if b"trackway.learner.ranks.process" in line and line[-1] in parents]


# Four processes load torch. Ranks that die are in tests/services/learner/ranks, restarts in test_manager.py.
@pytest.mark.extended
@pytest.mark.parametrize("victim", ["its own process", "another"])
async def test_a_run_whose_rank_was_killed_goes_on_from_its_checkpoint_and_leaves_no_process(
    runs: RunManager, agent, tiny_model: Path, sample, tmp_path: Path, victim: str
):
    agent.holding_at = 3
    await runs.start(run_request(tiny_model, tmp_path, sample, "sharded", "trackway.learner_ranks=2"))
    await async_until(lambda: held_at(agent, 3))
    first = pid_of(runs, "sharded")
    (rank,) = ranks_of(first)

    os.kill(first if victim == "its own process" else rank, signal.SIGKILL)
    if victim == "its own process":
        await async_until(lambda: ranks_left_by({first}) == [])
    agent.released.set()
    await async_until(lambda: runs.registry.info("sharded").restarts == 1)
    info = await ended(runs, "sharded")

    assert (info.state, info.step, info.restarts) == (RunState.FINISHED, STEPS, 1)
    log = (Path(info.folder) / "worker.log").read_text()
    died = "RankError: rank 1 of the learner ended by SIGKILL during 'update'" in log
    assert died == (victim == "another")
    assert "did not exit" not in log
    assert [row.step async for row in runs.registry.rows("sharded", follow=False) if "actor/grad_norm" in row.data] == [
        *range(1, STEPS + 1)
    ]
    assert ranks_left_by({first, pid_of(runs, "sharded")}) == []


@pytest.mark.extended
async def test_a_stopped_run_of_two_ranks_is_resumed_with_one_and_with_no_other_change(
    runs: RunManager, agent, tiny_model: Path, sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    agent.holding_at = 3
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "s3cret")
    await runs.start(run_request(tiny_model, tmp_path, sample, "narrower", "trackway.learner_ranks=2"))
    await async_until(lambda: held_at(agent, 3))
    leader = pid_of(runs, "narrower")
    (rank,) = ranks_of(leader)
    assert [b"s3cret" in Path(f"/proc/{pid}/environ").read_bytes() for pid in (leader, rank)] == [False, False]
    await runs.stop("narrower")
    await ended(runs, "narrower")

    with pytest.raises(TrackwayError, match=r"^actor_rollout_ref.actor.optim.lr, data.train_batch_size: expected no"):
        await runs.resume("narrower", changes={"data.train_batch_size": 4, "actor_rollout_ref.actor.optim.lr": 1.0})
    with pytest.raises(TrackwayError, match=r"trackway.learner_ranks: expected a multiple of trainer.nnodes \(2\)"):
        await runs.resume("narrower", changes={"trackway.learner_ranks": 3, "trainer.nnodes": 2})
    changes = {"trackway.learner_ranks": 1, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2}
    await runs.resume("narrower", changes=changes)
    await async_until(lambda: runs.registry.info("narrower").state is RunState.RUNNING)
    alone = ranks_of(pid_of(runs, "narrower"))
    agent.released.set()
    info = await ended(runs, "narrower")

    config = RunFolder(Path(info.folder)).config()
    assert alone == []
    assert (info.state, info.step, info.restarts) == (RunState.FINISHED, STEPS, 0)
    assert (config.placement.ranks, config.data.train_batch_size) == (1, 2)
    assert [
        row.step async for row in runs.registry.rows("narrower", follow=False) if "actor/grad_norm" in row.data
    ] == [*range(1, STEPS + 1)]
