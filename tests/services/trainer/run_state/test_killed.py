"""A run that is killed with -9 again and again trains the same steps on the same rows as one that nobody disturbs."""

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trackway.run_config import RunConfig, compose
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import GroupRequest
from trackway.wire.trainer import RunState
from trackway.wire.trajectory import TeacherScores, Trajectory

pytestmark = pytest.mark.slow

STEPS = 8
MOMENTS = [
    *("in the first validation", "in a rollout", "with all rollouts there", "in an update", "before a publication"),
    *("in a publication", "in a checkpoint", "before the checkpoint is the latest", "between checkpoint and row"),
    "after a row, its checkpoint damaged",
    *("in a validation", "in a row", "while an old checkpoint is removed", "after a row"),
]
OF_GROUPS = [
    *("before groups are resumed", "after groups are submitted", "after groups are used"),
    "after a snapshot of the groups",
]
BEHIND = 2
"""Most versions between a group's submission and its training in the overlapped run."""
OLD_DRAFT = ".state.json.0123456789ab.tmp"
CLOCK = ("timing_", "fully_async/", "perf/time", "perf/throughput", "perf/cpu_memory", "perf/max_memory")


class Run(NamedTuple):
    """A run that has ended, and what its agent service was asked for."""

    folder: RunFolder
    requests: list[GroupRequest]

    @property
    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Every row without what depends on the clock."""
        found = self.folder.rows()
        return [(row.step, {k: v for k, v in row.data.items() if not k.startswith(CLOCK)}) for row in found]

    @property
    def trained(self) -> list[tuple[int, list[int | str]]]:
        """Each step and the rows it was trained on, one for each rollout."""
        folder = self.folder.path / "trajectories"
        files = {step: read_trajectories(folder / f"step_{step}.parquet") for step in range(1, STEPS + 1)}
        return [(step, [trajectory.tags.sample_index for trajectory in trained]) for step, trained in files.items()]

    @property
    def named(self) -> list[tuple[int, list[tuple[int, int | str, int]]]]:
        """Each step and its rollouts: the step that they were asked for in, their prompt and their number."""
        folder = self.folder.path / "trajectories"
        files = {row.step: read_trajectories(folder / f"step_{row.step}.parquet") for row in self.folder.rows()[1:]}
        return [
            (step, [(t.tags.step, t.tags.sample_index, t.tags.rollout_n) for t in trained])
            for step, trained in files.items()
        ]

    @property
    def asked(self) -> dict[tuple[int, bool], set[int | str]]:
        """What the agents were asked for in each step, again and again or once."""
        asked: dict[tuple[int, bool], set[int | str]] = {}
        for request in self.requests:
            asked.setdefault((request.step, request.validation), set()).add(request.sample.index)
        return asked

    def learned(self, name: str) -> bytes:
        """A file of the last checkpoint."""
        return (self.folder.checkpoints / f"global_step_{STEPS}" / "actor" / name).read_bytes()


@pytest.fixture(scope="module")
def run_of(tiny_model: Path, sample, serving, new_agent, tmp_path_factory) -> Callable[..., Run]:
    def run(*moments: str, overrides: Sequence[str] = (), **agents: Any) -> Run:
        place = tmp_path_factory.mktemp("killed")
        write_rows(place / "train.parquet", [sample(index) for index in range(10)])
        write_rows(place / "val.parquet", [sample(index) for index in range(2)])
        folder, agent = RunFolder(place / "outputs" / "run"), new_agent(**agents)
        with serving(agent.app()) as url:
            urls = ServiceUrls(agent_url=url, tools_url="http://127.0.0.1:9", weights_url=str(place / "weights"))
            folder.create(config(tiny_model, place, overrides), urls)
            (folder.path / OLD_DRAFT).touch()
            os.utime(folder.path / OLD_DRAFT, (0, 0))
            command = [sys.executable, str(Path(__file__).with_name("dying_worker.py")), str(folder.path), *moments]
            log = subprocess.run(command, capture_output=True, text=True)
        assert log.returncode == 0, log.stdout[-3000:] + log.stderr[-3000:]
        return Run(folder, agent.requests)

    return run


@pytest.fixture(scope="module")
def killed(run_of: Callable[..., Run]) -> Run:
    """Killed at each of the moments, and gone on with after each."""
    return run_of(*MOMENTS)


def config(model: Path, place: Path, overrides: Sequence[str]) -> RunConfig:
    return compose(
        [
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={place}/train.parquet",
            f"data.val_files={place}/val.parquet",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.shuffle=True",
            "actor_rollout_ref.rollout.n=2",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=1",
            "trainer.max_actor_ckpt_to_keep=2",
            "trainer.test_freq=2",
            "trainer.logger=[tensorboard]",
            *overrides,
        ]
    )


def test_a_run_killed_at_any_moment_neither_loses_nor_repeats_a_batch(run_of: Callable[..., Run], killed: Run):
    undisturbed = run_of()

    assert (killed.folder.info().state, killed.folder.info().step) == (RunState.FINISHED, STEPS)
    assert [step for step, _ in killed.rows] == list(range(STEPS + 1))
    assert killed.rows == undisturbed.rows
    assert killed.trained == undisturbed.trained
    assert killed.asked == undisturbed.asked
    for name in ("model.safetensors", "optim.safetensors", "extra_state.safetensors"):
        assert killed.learned(name) == undisturbed.learned(name), name
    kept = {path.name for path in killed.folder.checkpoints.iterdir()}
    [damaged] = [name for name in kept if name.startswith("damaged_")]
    newest = {f"global_step_{STEPS - 1}", f"global_step_{STEPS}"}
    assert kept == {*newest, damaged, "latest_checkpointed_iteration.txt"}


@pytest.mark.extended
@pytest.mark.parametrize(
    "ahead",
    [
        [f"async_training.staleness_threshold={BEHIND - 0.5}"],
        ["trackway.over_sample_rate=0.5"],
    ],
    ids=["overlapped", "over-sampled"],
)
def test_an_overlapped_run_killed_at_any_moment_trains_every_prompt_once(
    run_of: Callable[..., Run], ahead: Sequence[str]
):
    steps = 20
    ahead = [
        *ahead,
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
    ]
    moments = sorted([*OF_GROUPS, *MOMENTS], key=lambda moment: "damaged" in moment)  # with another checkpoint there
    killed, undisturbed = run_of(*moments, overrides=ahead, late_s=0.2), run_of(overrides=ahead, late_s=0.2)

    assert (killed.folder.info().state, killed.folder.info().step) == (RunState.FINISHED, steps)
    assert [step for step, _ in killed.rows] == list(range(steps + 1))
    assert killed.asked == undisturbed.asked
    for run in (killed, undisturbed):
        names = [name for _, trained in run.named for name in trained]
        asked = {(step, index) for (step, validation), asked in run.asked.items() if not validation for index in asked}
        assert len(names) == len(set(names)) == 2 * 2 * steps
        assert {(step, index) for step, index, _ in names} <= asked
        assert any(row["rollouts/running"] for _, row in run.rows[1:])
        for step, row in run.rows[1:]:
            counts = {name: row[f"rollouts/{name}"] for name in run.folder.info().rollout_states}
            assert counts.pop("submitted") == sum(counts.values())
            assert counts["used"] == 2 * 2 * step
            assert row["training/off_policy/trajectory_staleness/max"] <= BEHIND


@pytest.mark.extended  # a teacher's scores lie in the trajectories, which the runs above have too
def test_a_killed_run_with_a_teacher_ends_in_the_same_weights(run_of: Callable[..., Run], tiny_model: Path):
    overrides = [
        "distillation.enabled=true",
        f"distillation.teacher_models.teacher_model.model_path={tiny_model}",
    ]
    moments = ("in an update", "in a publication", "between checkpoint and row")
    killed, undisturbed = (run_of(*at, overrides=overrides, change=scored) for at in (moments, ()))

    assert killed.folder.info().state is RunState.FINISHED
    assert killed.rows == undisturbed.rows and killed.trained == undisturbed.trained
    assert all(row["distillation/loss"] > 0 for _, row in killed.rows[1:])
    for name in ("model.safetensors", "optim.safetensors", "extra_state.safetensors"):
        assert killed.learned(name) == undisturbed.learned(name), name


def scored(trajectory: Trajectory) -> Trajectory:
    """The trajectory with the scores of a teacher."""
    logprobs = [-1.0 - token / 8 for token in trajectory.response_ids]
    own = [value for value, is_own in zip(logprobs, trajectory.response_mask, strict=True) if is_own]
    return trajectory.model_copy(update={"teacher": TeacherScores(teacher="teacher_model", logprobs=own)})


def test_tensorboard_shows_every_row_of_a_killed_run_once(killed: Run):
    events = EventAccumulator(str(killed.folder.path / "tensorboard"))
    events.Reload()

    written: dict[str, list[tuple[int, float]]] = {}
    for row in killed.folder.rows():
        for name, value in row.data.items():
            written.setdefault(name, []).append((row.step, struct.unpack("f", struct.pack("f", value))[0]))
    shown = {
        name: [(scalar.step, scalar.value) for scalar in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    assert shown == written


def test_a_worker_removes_the_drafts_that_an_earlier_one_left(killed: Run):
    assert not (killed.folder.path / OLD_DRAFT).exists()
