"""Where a run begins: the model, its own newest checkpoint, or one that is named."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from trackway.learner.learner import Learner
from trackway.run_config import RunConfig, compose
from trackway.system import digests
from trackway.trainer.data.copies import RemoteFolder
from trackway.trainer.data.dataset import Position
from trackway.trainer.loop.resume import begin
from trackway.trainer.loop.schedule import Progress
from trackway.trainer.run_state.checkpoint import Manifest, copy_checkpoint, save_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import MetricsRow

pytestmark = pytest.mark.slow


@pytest.fixture
def learner(tiny_model: Path) -> Learner:
    return Learner(learner_config(tiny_model, lr=1e-3))


def checkpoint(root: Path, learner: Learner, step: int) -> Progress:
    """One of this learner, with a row."""
    progress = Progress(step=step, position=Position(epoch=1, batch=step), metrics={"x": float(step)})
    save_checkpoint(root, step, learner.save, progress.model_dump(mode="json"))
    return progress


def mode(name: str, path: Path | str | None = None) -> RunConfig:
    return compose([f"trainer.resume_mode={name}", *([] if path is None else [f"+trainer.resume_from_path={path}"])])


def rows(folder: RunFolder) -> list[int]:
    return [row.step for row in folder.rows()]


def test_auto_begins_at_the_model_when_there_is_no_checkpoint(folder: RunFolder, learner: Learner):
    folder.append_row(MetricsRow(step=0, data={"x": 0.0}))

    assert begin(folder, mode("auto"), learner) == (Progress(), None, "", ())
    assert rows(folder) == []


def test_auto_goes_on_from_the_newest_checkpoint_and_its_row(folder: RunFolder, learner: Learner):
    checkpoint(folder.checkpoints, learner, 1)
    saved = checkpoint(folder.checkpoints, learner, 2)
    for step in (1, 3):
        folder.append_row(MetricsRow(step=step, data={"x": float(step)}))

    assert begin(folder, mode("auto"), learner) == (saved, 2, "", ())
    assert rows(folder) == [1, 2]


def test_disable_begins_at_the_model_whatever_was_saved(folder: RunFolder, learner: Learner):
    checkpoint(folder.checkpoints, learner, 2)

    assert begin(folder, mode("disable"), learner) == (Progress(), None, "", ())


def test_a_named_checkpoint_gives_its_weights_and_place_but_not_its_row(
    folder: RunFolder, learner: Learner, tiny_model: Path, tmp_path: Path, rollout
):
    learner.update([rollout(0, n, float(n)) for n in range(2)])
    checkpoint(tmp_path / "other", learner, 4)
    fresh = Learner(learner_config(tiny_model, lr=1e-3))

    beginning = begin(folder, mode("resume_path", tmp_path / "other" / "global_step_4"), fresh)

    assert beginning == (Progress(step=4, position=Position(epoch=1, batch=4)), None, "", ())
    assert (logprobs_of(fresh), fresh.updates) == (logprobs_of(learner), 1)
    assert rows(folder) == []


def test_what_was_trained_since_goes_before_the_named_checkpoint(folder: RunFolder, learner: Learner, tmp_path: Path):
    checkpoint(tmp_path / "other", learner, 4)
    own = checkpoint(folder.checkpoints, learner, 5)

    assert begin(folder, mode("resume_path", tmp_path / "other" / "global_step_4"), learner) == (own, 5, "", ())


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


@pytest.fixture
def copies(learner: Learner, tmp_path: Path, rollout) -> str:
    """URL of the copies of checkpoints 4 and 5 of a trained learner."""
    learner.update([rollout(0, n, float(n)) for n in range(2)])
    for step in (3, 4, 5):
        checkpoint(tmp_path / "other", learner, step)
        copy_checkpoint(tmp_path / f"other/global_step_{step}", f"memory:/{tmp_path}/copies", keep=2)
    return f"memory:/{tmp_path}/copies"


def test_a_copy_at_a_url_gives_its_weights_and_place(
    folder: RunFolder, learner: Learner, tiny_model: Path, copies: str
):
    fresh = Learner(learner_config(tiny_model, lr=1e-3))

    beginning = begin(folder, mode("resume_path", f"{copies}/global_step_4"), fresh)

    assert beginning == (Progress(step=4, position=Position(epoch=1, batch=4)), None, "", ())
    assert (logprobs_of(fresh), fresh.updates) == (logprobs_of(learner), 1)
    assert [path.name for path in folder.path.glob(".fetched*")] == []


def test_a_copy_that_went_or_is_not_whole_is_an_error_that_names_the_others(
    folder: RunFolder, learner: Learner, copies: str
):
    RemoteFolder(f"{copies}/global_step_5").remove("manifest.json")  # as one that is being written

    for step in (3, 5):
        with pytest.raises(TrackwayError, match=r"got memory:.*near it are global_step_4, global_step_5$") as caught:
            begin(folder, mode("resume_path", f"{copies}/global_step_{step}"), learner)
        assert caught.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("name", ["actor/model.safetensors", "manifest.json"])
def test_a_damaged_copy_is_refused_by_its_url(
    folder: RunFolder, learner: Learner, tmp_path: Path, copies: str, name: str
):
    (tmp_path / "other-bytes").write_bytes(b"{}")
    RemoteFolder(f"{copies}/global_step_4").put(tmp_path / "other-bytes", name)

    with pytest.raises(TrackwayError, match=rf"the checkpoint {copies}/global_step_4 is damaged: {name}: ") as caught:
        begin(folder, mode("resume_path", f"{copies}/global_step_4"), learner)

    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert f"start a run from another one of {copies}" in caught.value.message


def damage(folder: RunFolder, step: int) -> None:
    """Cut a checkpoint's weights off."""
    checkpoint = folder.checkpoints / f"global_step_{step}"
    weights = checkpoint / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def checkpoints(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("*global_step_*"))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered_with_the_command(
    folder: RunFolder, learner: Learner
):
    for step in (1, 2, 3):
        checkpoint(folder.checkpoints, learner, step)
    damage(folder, 2)
    damage(folder, 3)
    folder.append_row(MetricsRow(step=3, data={"x": 3.0}))

    with pytest.raises(TrackwayError) as caught:
        begin(folder, mode("auto"), learner)

    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert re.fullmatch(
        rf"the checkpoint {folder.checkpoints}/global_step_3 is damaged: .*; global_step_1 before it is whole: "
        "`trackway train --resume run --skip-damaged` goes on from it and keeps the damaged one as "
        "damaged_global_step_3",
        caught.value.message,
    )
    assert checkpoints(folder) == ["global_step_1", "global_step_2", "global_step_3"]
    assert rows(folder) == [3]


def test_a_damaged_checkpoint_that_was_named_is_never_replaced_by_another(
    folder: RunFolder, learner: Learner, tmp_path: Path
):
    other_run = RunFolder(tmp_path / "other")
    for step in (1, 2):
        checkpoint(other_run.checkpoints, learner, step)
    damage(other_run, 2)
    config = mode("resume_path", other_run.checkpoints / "global_step_2")

    with pytest.raises(
        TrackwayError, match=r"damaged: .*; restore it from a copy, or start a run from another one of .*/checkpoints$"
    ) as caught:
        begin(folder, config, learner, skip_damaged=True)

    assert caught.value.code is ErrorCode.CHECKPOINT_CORRUPT
    assert checkpoints(other_run) == ["global_step_1", "global_step_2"]


def test_damaged_checkpoints_are_left_out_when_that_is_asked_for_and_their_rows_go_as_on_any_resume(
    folder: RunFolder, learner: Learner, tiny_model: Path, rollout
):
    saved = checkpoint(folder.checkpoints, learner, 1)
    before = logprobs_of(learner)
    learner.update([rollout(0, n, float(n)) for n in range(2)])
    for step in (2, 3):
        checkpoint(folder.checkpoints, learner, step)
        damage(folder, step)
    for step in (0, 1, 2, 3):
        folder.append_row(MetricsRow(step=step, data={"x": float(step)}))

    progress, saved_step, notice, _ = begin(folder, mode("auto"), learner, skip_damaged=True)

    assert (progress, saved_step, logprobs_of(learner)) == (saved, 1, before)
    assert rows(folder) == [0, 1]
    assert checkpoints(folder) == ["damaged_global_step_2", "damaged_global_step_3", "global_step_1"]
    assert re.fullmatch(
        r"went back to step 1: the checkpoint .*/global_step_3 is damaged: .*; it is kept as damaged_global_step_3; "
        r"went back to step 1: the checkpoint .*/global_step_2 is damaged: .*; it is kept as damaged_global_step_2",
        notice,
    )


def test_without_a_whole_checkpoint_nothing_is_moved_and_the_number_that_is_kept_is_named(
    folder: RunFolder, learner: Learner
):
    checkpoint(folder.checkpoints, learner, 1)
    damage(folder, 1)
    config = compose(["trainer.max_actor_ckpt_to_keep=1"])

    with pytest.raises(TrackwayError) as caught:
        begin(folder, config, learner, skip_damaged=True)

    assert caught.value.message.endswith(
        "; of the 1 checkpoints that are kept (trainer.max_actor_ckpt_to_keep=1) none is whole: restore one from a "
        "copy, or train from the beginning under another trainer.experiment_name"
    )
    assert checkpoints(folder) == ["global_step_1"]


def test_a_whole_checkpoint_of_another_model_is_no_damaged_one(folder: RunFolder, learner: Learner, tmp_path: Path):
    checkpoint(folder.checkpoints, learner, 1)
    saved = checkpoint(folder.checkpoints, learner, 2)
    path = folder.checkpoints / "global_step_2"
    save_file({"other": torch.zeros(1)}, path / "actor" / "model.safetensors")
    described = digests(path, [file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json"])
    (path / "manifest.json").write_text(Manifest(files=described, release="0", format=1).model_dump_json())

    with pytest.raises(TrackwayError, match="global_step_2 cannot be loaded") as caught:
        begin(folder, mode("auto"), learner, skip_damaged=True)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert checkpoints(folder) == ["global_step_1", "global_step_2"]
    assert saved.step == 2
