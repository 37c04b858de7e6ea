"""Where a run begins: the model, its own newest checkpoint, or one that is named."""

from pathlib import Path

import pytest

from trackway.trainer.checkpoint import save_checkpoint
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.dataset import Position
from trackway.trainer.learner import Learner, LearnerConfig
from trackway.trainer.plan import Progress
from trackway.trainer.resume import begin
from trackway.trainer.run_folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow


@pytest.fixture
def learner(tiny_model: Path) -> Learner:
    return Learner(LearnerConfig(str(tiny_model), lr=1e-3))


def checkpoint(root: Path, learner: Learner, step: int) -> Progress:
    """One of this learner, with a row."""
    progress = Progress(step=step, position=Position(epoch=1, batch=step), metrics={"x": float(step)})
    save_checkpoint(root, step, learner, progress.model_dump(mode="json"))
    return progress


def mode(name: str, path: Path | str | None = None) -> RunConfig:
    return compose([f"trainer.resume_mode={name}", *([] if path is None else [f"+trainer.resume_from_path={path}"])])


def rows(folder: RunFolder) -> list[int]:
    return [row.step for row in folder.rows()]


def test_auto_begins_at_the_model_when_there_is_no_checkpoint(folder: RunFolder, learner: Learner):
    folder.append_row(MetricsRow(step=0, data={"x": 0.0}))

    assert begin(folder, mode("auto"), learner) == (Progress(), None)
    assert rows(folder) == []


def test_auto_goes_on_from_the_newest_checkpoint_and_its_row(folder: RunFolder, learner: Learner):
    checkpoint(folder.checkpoints, learner, 1)
    saved = checkpoint(folder.checkpoints, learner, 2)
    for step in (1, 3):
        folder.append_row(MetricsRow(step=step, data={"x": float(step)}))

    assert begin(folder, mode("auto"), learner) == (saved, 2)
    assert rows(folder) == [1, 2]


def test_disable_begins_at_the_model_whatever_was_saved(folder: RunFolder, learner: Learner):
    checkpoint(folder.checkpoints, learner, 2)

    assert begin(folder, mode("disable"), learner) == (Progress(), None)


def test_a_named_checkpoint_gives_its_weights_and_place_but_not_its_row(
    folder: RunFolder, learner: Learner, tiny_model: Path, tmp_path: Path, rollout
):
    learner.update([rollout(0, n, float(n)) for n in range(2)])
    checkpoint(tmp_path / "other", learner, 4)
    fresh = Learner(LearnerConfig(str(tiny_model), lr=1e-3))

    beginning = begin(folder, mode("resume_path", tmp_path / "other" / "global_step_4"), fresh)

    assert beginning == (Progress(step=4, position=Position(epoch=1, batch=4)), None)
    assert (fresh.canary(), fresh.updates) == (learner.canary(), 1)
    assert rows(folder) == []


def test_what_was_trained_since_goes_before_the_named_checkpoint(folder: RunFolder, learner: Learner, tmp_path: Path):
    checkpoint(tmp_path / "other", learner, 4)
    own = checkpoint(folder.checkpoints, learner, 5)

    assert begin(folder, mode("resume_path", tmp_path / "other" / "global_step_4"), learner) == (own, 5)


@pytest.mark.parametrize(
    ("below", "said"),
    [
        ("global_step_9", r"got .*/other/global_step_9; near it are global_step_4$"),
        ("", r"expected a checkpoint, .../global_step_<n> with a state.json, got .*/other; near it are global_step_4$"),
        ("nowhere/else", r"got .*/other/nowhere/else$"),
    ],
)
def test_a_named_checkpoint_that_is_not_there_is_an_error_that_names_those_near_it(
    folder: RunFolder, learner: Learner, tmp_path: Path, below: str, said: str
):
    checkpoint(tmp_path / "other", learner, 4)

    with pytest.raises(TrackwayError, match=said) as caught:
        begin(folder, mode("resume_path", tmp_path / "other" / below), learner)

    assert (caught.value.code, caught.value.detail["key"]) == (ErrorCode.INVALID_REQUEST, "trainer.resume_from_path")


def test_resume_path_without_a_path_is_an_error(folder: RunFolder, learner: Learner):
    with pytest.raises(TrackwayError, match=r"trainer.resume_from_path: expected .../global_step_<n>.*got nothing"):
        begin(folder, mode("resume_path"), learner)


def test_a_checkpoint_that_is_cut_off_says_which_it_is(folder: RunFolder, learner: Learner):
    checkpoint(folder.checkpoints, learner, 1)
    weights = folder.checkpoints / "global_step_1" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])

    with pytest.raises(TrackwayError, match=r"the checkpoint .*/global_step_1 cannot be loaded: "):
        begin(folder, mode("auto"), learner)
