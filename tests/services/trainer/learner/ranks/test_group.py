"""Ranks in processes of their own: commands, their errors, and ranks that are lost."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.trainer.learner.config import LearnerConfig
from trackway.trainer.learner.learner import Learner
from trackway.trainer.learner.ranks.group import LeadingLearner, RankError, RankGroup
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


@pytest.fixture
def config(tiny_model: Path) -> LearnerConfig:
    return learner_config(tiny_model, dtype="float64", lr=1e-2)


@pytest.fixture
def batch(rollout: Rollout) -> list[Trajectory]:
    return [rollout(row // 2, row % 2, float(row % 2), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(4)]


@contextmanager
def leading(
    config: LearnerConfig, count: int = 2, deadline_s: float = 120.0
) -> Iterator[tuple[LeadingLearner, RankGroup]]:
    group = RankGroup(config, count, deadline_s)
    try:
        yield LeadingLearner(config, group), group
    finally:
        group.close()


def test_a_learner_of_two_ranks_does_what_one_process_does(
    config: LearnerConfig, batch: list[Trajectory], tmp_path: Path
):
    alone = Learner(config)
    alone.save(tmp_path / "start")
    expected = [alone.update(batch).metrics for _ in range(2)]

    with leading(config) as (learner, group):
        learner.load(tmp_path / "start")
        metrics = [learner.update(batch).metrics]
        with pytest.raises(ValueError, match="expected a trajectory to train on, got none"):
            learner.update([])
        with pytest.raises(FileNotFoundError):
            learner.load(tmp_path / "nowhere")
        metrics.append(learner.update(batch).metrics)
        learner.export(tmp_path / "several")
        learner.proof(tmp_path / "several", 1)
        canary, log_probs = learner.canary(), learner.log_probs(batch)
        processes = list(group.processes.values())

    assert metrics == [pytest.approx(row, abs=1e-10) for row in expected]
    assert canary.logprobs == pytest.approx(alone.canary().logprobs, abs=1e-10)
    assert log_probs == [pytest.approx(row, abs=1e-10) for row in alone.log_probs(batch)]
    assert [process.returncode for process in processes] == [0]


def test_a_killed_rank_ends_the_update_by_name_and_training_goes_on_from_the_checkpoint(
    config: LearnerConfig, batch: list[Trajectory], tmp_path: Path
):
    with leading(config, 3) as (learner, group):
        learner.update(batch)
        saved, lost = learner.snapshot(), learner.snapshot()
        saved.write(tmp_path)
        saved.close()
        killed, error = group.processes[2], r"^rank 2 of the learner ended by SIGKILL during 'update' \(.* by peer"
        killed.send_signal(signal.SIGKILL)
        with pytest.raises(RankError, match=error):
            learner.update(batch)
        with pytest.raises(RankError, match=r"rank 2 of the learner ended by SIGKILL during 'write of a checkpoint'"):
            lost.write(tmp_path / "lost")

    alone = Learner(config)
    alone.update(batch)
    expected = alone.update(batch).metrics
    resumed = Learner(config)
    resumed.load(tmp_path)
    assert resumed.update(batch).metrics == pytest.approx(expected, abs=1e-10)


def test_a_rank_that_does_not_answer_is_an_error_after_the_deadline(config: LearnerConfig, batch: list[Trajectory]):
    with leading(config, deadline_s=3.0) as (learner, group):
        learner.update(batch)
        os.kill(group.processes[1].pid, signal.SIGSTOP)
        with pytest.raises(
            RankError, match=r"^rank 1 of the learner gave no answer in 3 s during 'update' \(.*; see worker\.log"
        ):
            learner.update(batch)


def test_a_command_that_fails_only_in_another_rank_is_an_error(config: LearnerConfig, tmp_path: Path):
    with leading(config) as (learner, group):
        learner.save(tmp_path)
        folder = OnlyInTheFirst(tmp_path)
        with pytest.raises(RankError, match=r"^'load' failed in other ranks .*: rank 1: FileNotFoundError"):
            learner.load(folder)  # pyright: ignore[reportArgumentType]
        assert [process.wait(10) for process in group.processes.values()] == [-signal.SIGKILL]


def test_fewer_gpus_than_ranks_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    with pytest.raises(ValueError, match=r"expected a GPU for each of trackway\.learner_ranks=2, got 1; lower it"):
        RankGroup(learner_config(tiny_model, device="cuda"), 2, 60.0)


class OnlyInTheFirst:
    """A folder that another process does not find."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()

    def __truediv__(self, name: str) -> Path:
        return self.folder / name if os.getpid() == self.owner else Path("/nowhere") / name
