"""Ranks in processes of their own: commands, their errors, and ranks that are lost."""

import atexit
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from tests.services.trainer.learner_settings import learner_config
from trackway.clients.weights import WeightStore
from trackway.trainer.config.placement import Placement
from trackway.trainer.learner.config import LearnerConfig
from trackway.trainer.learner.learner import Learner
from trackway.trainer.learner.ranks.group import LeadingLearner, RankError, RankGroup, require_shared
from trackway.trainer.learner.ranks.publication import RankWriters
from trackway.trainer.learner.ranks.sharding import Ranks
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

T = TypeVar("T")
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
    group = RankGroup(config, Placement(count), deadline_s)
    try:
        yield LeadingLearner(config, group), group
    finally:
        group.close()


def exits_with_its_interpreter(ranks: Ranks) -> None:
    """From now on the end of the interpreter sets another exit status, as a thread of gloo may."""
    if not ranks.is_first:
        atexit.register(os._exit, 9)


def test_a_stopped_rank_exits_with_0(config: LearnerConfig):
    with leading(config) as (learner, group):
        processes = [*group.processes.values()]
        learner.publish_share(exits_with_its_interpreter)

    assert [process.poll() for process in processes] == [0]


def test_a_learner_of_two_ranks_does_what_one_process_does_until_a_command_fails_only_in_another_rank(
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
        require_shared(learner, tmp_path)
        with pytest.raises(ValueError, match=r"to see the files of .*, got none in rank 1 after 0\.1 s; .* one volume"):
            require_shared(learner, OnlyInTheFirst(tmp_path), 0.1)  # pyright: ignore[reportArgumentType]
        assert list(tmp_path.glob(".*")) == []
        metrics.append(learner.update(batch).metrics)
        learner.export(tmp_path / "several")
        learner.proof(tmp_path / "several", 1)
        canary, log_probs = learner.canary(), learner.log_probs(batch)
        with pytest.raises(RankError, match=r"^'load' failed in other ranks .*: rank 1: FileNotFoundError"):
            learner.load(OnlyInTheFirst(tmp_path / "start"))  # pyright: ignore[reportArgumentType]
        assert [process.wait(10) for process in group.processes.values()] == [-signal.SIGKILL]

    assert metrics == [pytest.approx(row, abs=1e-10) for row in expected]
    assert canary.logprobs == pytest.approx(alone.canary().logprobs, abs=1e-10)
    assert log_probs == [pytest.approx(row, abs=1e-10) for row in alone.log_probs(batch)]


def test_a_rank_killed_between_files_of_a_version_leaves_it_invisible_and_training_goes_on_from_the_checkpoint(
    config: LearnerConfig, batch: list[Trajectory], tmp_path: Path
):
    store, exported = WeightStore(str(tmp_path / "store")), tmp_path / "exported"
    with leading(config, 3) as (learner, _):
        learner.update(batch)
        saved, lost = learner.snapshot(), learner.snapshot()
        saved.write(tmp_path)
        saved.close()
        learner.export_to_engines(exported)
        store.publish(1, "run", exported, writers=RankWriters(learner))
        error = r"^rank 2 of the learner ended by SIGKILL during 'publish_share' \(.* by peer"
        with pytest.raises(RankError, match=error):
            store.publish(2, "run", exported, writers=RankWriters(LosesARank(learner)))
        with pytest.raises(RankError, match=r"rank 2 of the learner ended by SIGKILL during 'write of a checkpoint'"):
            lost.write(tmp_path / "lost")

    shares = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert {path.name for path in exported.glob("*.safetensors")} == {*shares}
    assert not {shares[2], "manifest.json"} & {path.name for path in (tmp_path / "store" / "2").iterdir()}
    latest = store.latest()
    assert latest is not None
    assert latest.version == 1
    with pytest.raises(TrackwayError, match=r"expected weights version 2 in .*, got none"):
        store.fetch(2, tmp_path / "cache")
    store.publish(2, "run", exported)
    assert store.fetch(2, tmp_path / "cache") == tmp_path / "store" / "2"

    alone = Learner(config)
    alone.update(batch)
    expected = alone.update(batch).metrics
    resumed = Learner(config)
    resumed.load(tmp_path)
    assert resumed.update(batch).metrics == pytest.approx(expected, abs=1e-10)


def test_a_rank_that_does_not_answer_is_an_error_after_the_deadline(config: LearnerConfig, batch: list[Trajectory]):
    with leading(config, deadline_s=3.0) as (learner, group):
        learner.update(batch)
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(
            RankError, match=r"^rank 1 of the learner gave no answer in 3 s during 'update' \(.*; see worker\.log"
        ):
            learner.update(batch)


def test_fewer_gpus_than_ranks_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    with pytest.raises(ValueError, match=r"expected a GPU for each of trackway\.learner_ranks=2, got 1; lower it"):
        RankGroup(learner_config(tiny_model, device="cuda"), Placement(2), 60.0)


class LosesARank:
    """A learner whose last rank dies when the files of a version are copied, after their description."""

    def __init__(self, learner: LeadingLearner) -> None:
        self.learner, self.calls = learner, 0

    def publish_share(self, work: Callable[[Ranks], T]) -> list[T]:
        self.calls += 1
        return self.learner.publish_share(work if self.calls == 1 else FatalInTheLast(work))


class FatalInTheLast(Generic[T]):
    """Work that kills the last rank."""

    def __init__(self, work: Callable[[Ranks], T]) -> None:
        self.work = work

    def __call__(self, ranks: Ranks) -> T:
        if ranks.index == ranks.count - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.work(ranks)


class OnlyInTheFirst:
    """A folder that another process does not find."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.owner = folder, os.getpid()

    def __truediv__(self, name: str) -> Path:
        return self.folder / name if os.getpid() == self.owner else Path("/nowhere") / name
