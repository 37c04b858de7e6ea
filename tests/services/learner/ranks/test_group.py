"""Ranks in processes of their own: commands, their errors, and ranks that are lost."""

import fcntl
import os
import pickle
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.services.trainer.learner_settings import learner_config
from tests.services.trainer.rank_processes import listening
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.learner.config import LearnerConfig
from trackway.learner.learner import Learner
from trackway.learner.ranks import group as group_module
from trackway.learner.ranks.group import (
    COMMAND,
    EXIT_PEER_LOST,
    SETTINGS,
    STOP,
    GroupSettings,
    LeadingLearner,
    RankError,
    RankGroup,
    end_group,
    require_shared,
    send_command,
)
from trackway.learner.ranks.launch import LocalLauncher
from trackway.learner.ranks.publication import RankWriters
from trackway.learner.ranks.sharding import join
from trackway.run_config.placement import Placement
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = pytest.mark.slow

Rollout = Callable[..., Trajectory]


@pytest.fixture
def config(tiny_model: Path) -> LearnerConfig:
    return learner_config(tiny_model, dtype="float64", lr=1e-2)


@pytest.fixture
def batch(rollout: Rollout) -> list[Trajectory]:
    return [rollout(row // 2, row % 2, float(row % 2), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(4)]


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@contextmanager
def leading(
    config: LearnerConfig, count: int = 2, deadline_s: float = 120.0
) -> Iterator[tuple[LeadingLearner, RankGroup]]:
    group = RankGroup(config, Placement(count), deadline_s)
    try:
        yield LeadingLearner(config, group), group
    finally:
        group.close()


def test_a_stopped_rank_exits_with_0(config: LearnerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # The end of the interpreter sets another exit status, as a thread of gloo may.
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os._exit, 9)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with leading(config) as (_, group):
        processes = [*group.processes.values()]

    assert [process.poll() for process in processes] == [0]


def test_a_learner_of_two_ranks_does_what_one_process_does_until_a_command_fails_only_in_another_rank(
    config: LearnerConfig, batch: list[Trajectory], tmp_path: Path
):
    alone = Learner(config)
    alone.save(tmp_path / "start")
    rows = [([3, 4, 5, 6, 7][: 2 + row], [0, 1, 1, 0, 1][: 2 + row]) for row in range(3)]
    expected = [alone.update(batch).metrics, alone.supervise(rows), alone.update(batch).metrics]

    with leading(config) as (learner, group):
        learner.load(tmp_path / "start")
        metrics = [learner.update(batch).metrics]
        with pytest.raises(ValueError, match="expected a trajectory to train on, got none"):
            learner.update([])
        with pytest.raises(FileNotFoundError):
            learner.load(tmp_path / "nowhere")
        require_shared(learner, tmp_path)
        error = r"to see the files of .*, got none in rank 1 after 0\.1 s; .* one volume"
        with only_here(tmp_path) as folder, pytest.raises(ValueError, match=error):
            require_shared(learner, folder, 0.1)
        assert list(tmp_path.glob(".*")) == []
        metrics += [learner.supervise(rows), learner.update(batch).metrics]
        loss = learner.supervised_loss(rows)
        learner.export(tmp_path / "several")
        learner.proof(tmp_path / "several", 1)
        log_probs = learner.log_probs(batch)
        error = r"^'load' failed in other ranks .*: rank 1: FileNotFoundError"
        with only_here(tmp_path / "start") as folder, pytest.raises(RankError, match=error):
            learner.load(folder)
        assert [process.wait(60) for process in group.processes.values()] == [-signal.SIGKILL]

    assert metrics == [pytest.approx(row, abs=1e-10) for row in expected]
    assert log_probs == [pytest.approx(row, abs=1e-10) for row in alone.log_probs(batch)]
    assert loss == pytest.approx(alone.supervised_loss(rows), abs=1e-10)


@pytest.mark.extended
def test_a_rank_killed_between_files_of_a_version_leaves_it_invisible_and_training_goes_on_from_the_checkpoint(
    config: LearnerConfig, batch: list[Trajectory], tmp_path: Path
):
    store, exported = WeightStore(str(tmp_path / "store")), tmp_path / "exported"
    shares = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    with leading(config, 3) as (learner, group):
        learner.update(batch)
        saved, lost = learner.snapshot(), learner.snapshot()
        saved.write(tmp_path)
        saved.close()
        learner.export_to_engines(exported)
        store.publish(1, "run", exported, ANY_PROOF, writers=RankWriters(learner))
        error = r"^rank 2 of the learner ended by SIGKILL during 'publish_share' \(.* by peer"
        with pytest.raises(RankError, match=error):
            store.publish(2, "run", exported, ANY_PROOF, writers=LosesARank(learner, group.pids[1], shares[2]))
        with pytest.raises(RankError, match=r"rank 2 of the learner ended by SIGKILL during 'write of a checkpoint'"):
            lost.write(tmp_path / "lost")

    assert {path.name for path in exported.glob("*.safetensors")} == {*shares}
    copies = {path.name for path in (tmp_path / "store" / "2").iterdir()}
    assert copies & {*shares, "manifest.json"} == {*shares[:2]}
    latest = store.latest()
    assert latest is not None
    assert latest.version == 1
    with pytest.raises(TrackwayError, match=r"expected weights version 2 in .*, got none"):
        store.fetch(2, tmp_path / "cache")
    store.publish(2, "run", exported, ANY_PROOF)
    assert store.fetch(2, tmp_path / "cache") == tmp_path / "store" / "2"

    alone = Learner(config)
    alone.update(batch)
    expected = alone.update(batch).metrics
    resumed = Learner(config)
    resumed.load(tmp_path)
    assert resumed.update(batch).metrics == pytest.approx(expected, abs=1e-10)


@pytest.mark.extended
def test_a_rank_that_does_not_answer_is_an_error_after_the_deadline(config: LearnerConfig, batch: list[Trajectory]):
    with leading(config, deadline_s=3.0) as (learner, group):
        learner.update(batch)
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(
            RankError, match=r"^rank 1 of the learner gave no answer in 3 s during 'update' \(.*; see worker\.log"
        ):
            learner.update(batch)


def test_a_rank_that_dies_ends_the_process_by_name_where_no_collective_fails(
    config: LearnerConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    ended = queue.Queue[int]()
    monkeypatch.setattr(group_module, "LOST_S", 0.1)
    monkeypatch.setattr(group_module.os, "_exit", ended.put)
    with leading(config) as (_, group), group.watched("update"):
        os.kill(group.pids[0], signal.SIGKILL)
        status = ended.get(timeout=30)

    assert status == EXIT_PEER_LOST
    said = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert said[0] == (
        "rank 1 of the learner ended by SIGKILL during 'update'; the run goes on from its last checkpoint"
    )


def test_an_error_of_the_first_ranks_gpu_names_no_other_rank(config: LearnerConfig):
    with leading(config) as (_, group):
        with pytest.raises(torch.OutOfMemoryError), group.command("release_memory"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert [process.wait(60) for process in group.processes.values()] == [-signal.SIGKILL]


def test_a_group_that_does_not_end_is_left_behind_by_name_and_the_process_can_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    blocked, at_exit = threading.Event(), Mock()
    monkeypatch.setattr(group_module, "END_S", 0.1)
    monkeypatch.setattr(group_module.atexit, "register", at_exit)
    monkeypatch.setattr(group_module.distributed, "destroy_process_group", blocked.wait)
    try:
        end_group()
    finally:
        blocked.set()

    [said] = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert said == "the group of the learner's ranks did not end in 0.1 s and is left behind"
    at_exit.assert_called_once_with(os._exit, EXIT_PEER_LOST)


def test_ranks_of_one_node_listen_on_loopback_only(config: LearnerConfig):
    before = listening(os.getpid())
    with leading(config) as (_, group):
        opened = [listening(os.getpid()) - before, listening(group.pids[0])]

    assert [{host for host, _ in addresses} for addresses in opened] == [{"127.0.0.1"}] * 2


def test_a_pickle_in_the_store_runs_nothing(config: LearnerConfig, tmp_path: Path):
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    written = tmp_path / "written"
    for key in ("config", f"{COMMAND}/0"):
        store.set(key, pickle.dumps(Touches(written)))  # pyright: ignore[reportArgumentType]  # it takes bytes
    settings = SETTINGS.dump_json(GroupSettings(config, Placement(2), 30.0)).decode()
    rank = LocalLauncher().start(1, ["1", "127.0.0.1", str(store.port), settings])
    join(store, 0, Placement(2), "cpu", 30.0)
    send_command(STOP, ())
    distributed.destroy_process_group()

    assert (rank.wait(60), written.exists()) == (0, False)


def test_fewer_gpus_than_ranks_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)

    with pytest.raises(ValueError, match=r"expected a GPU for each of trackway\.learner_ranks=2, got 1; lower it"):
        RankGroup(learner_config(tiny_model, device="cuda"), Placement(2), 60.0)


class LosesARank(RankWriters):
    """Writers of which one rank dies between the other ranks' copies and its own."""

    def __init__(self, learner: LeadingLearner, pid: int, share: str) -> None:
        super().__init__(learner)
        self.pid, self.share = pid, share

    def copy(self, store: WeightStore, version: int, folder: Path, names: Sequence[str]) -> None:
        super().copy(store, version, folder, [name for name in names if name != self.share])
        os.kill(self.pid, signal.SIGKILL)
        super().copy(store, version, folder, names)


@contextmanager
def only_here(folder: Path) -> Iterator[Path]:
    """A path of the folder that another process does not find."""
    opened = os.open(folder, os.O_RDONLY)
    here = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, 900)  # no other process has so many files open
    try:
        yield Path(f"/proc/self/fd/{here}")
    finally:
        os.close(here)
        os.close(opened)
