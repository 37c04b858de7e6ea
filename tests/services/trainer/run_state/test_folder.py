import itertools
import os
import shutil
from pathlib import Path

import pytest

from trackway.run_config import RunConfig, resolve
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, RUN_TRANSITIONS, MetricsRow, RunState


def test_a_new_run_is_starting_and_its_files_read_back(folder: RunFolder, urls: ServiceUrls):
    assert folder.info().state is RunState.STARTING
    assert folder.config() == RunConfig()
    assert folder.services() == urls


def test_a_run_keeps_its_uid_and_another_of_the_same_name_has_another(folder: RunFolder, tmp_path: Path):
    uid = folder.info().uid
    folder.move(RunState.FAILED)
    folder.move(RunState.STARTING)
    elsewhere = RunFolder(tmp_path / "elsewhere" / folder.name)
    elsewhere.create(folder.config(), folder.services())

    assert folder.info().uid == uid != elsewhere.info().uid
    assert len(uid) == 32


def test_a_name_that_is_taken_is_a_conflict(folder: RunFolder, urls: ServiceUrls):
    with pytest.raises(TrackwayError) as caught:
        folder.create(RunConfig(), urls)

    assert caught.value.code is ErrorCode.CONFLICT


def test_the_checkpoints_may_lie_elsewhere_but_not_beside_those_of_another_run(urls: ServiceUrls, tmp_path: Path):
    config = resolve({"trainer.default_local_dir": str(tmp_path / "disk" / "mine")})
    run, other = RunFolder(tmp_path / "outputs" / "run"), RunFolder(tmp_path / "outputs" / "other")

    run.create(config, urls)
    (run.checkpoints / "global_step_3").mkdir()

    assert (tmp_path / "disk" / "mine" / "global_step_3").is_dir()
    with pytest.raises(TrackwayError, match=r"got .*/disk/mine with global_step_3; .*resume_from_path=.*global_step_3"):
        other.create(config, urls)
    assert not other.path.exists()
    shutil.rmtree(run.path)
    assert (tmp_path / "disk" / "mine" / "global_step_3").is_dir()


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RunState, RunState)))
def test_a_state_follows_another_only_as_the_table_says(folder: RunFolder, before: RunState, after: RunState):
    (folder.path / "state.json").write_text(folder.info().model_copy(update={"state": before}).model_dump_json())

    if after in RUN_TRANSITIONS[before]:
        assert folder.move(after, "why").message == "why"
        assert folder.info().state is after
    else:
        with pytest.raises(TrackwayError, match=f"run 'run' is {before}: expected"):
            folder.move(after)
        assert folder.info().state is before


def test_a_finished_run_can_be_extended_and_a_stopped_or_failed_one_can_start_again_or_be_given_up():
    after = {RunState.STARTING, RunState.FAILED}

    assert RUN_TRANSITIONS[RunState.FINISHED] == {RunState.STARTING}
    assert all(RUN_TRANSITIONS[state] == after for state in ENDED - {RunState.FINISHED})


def test_rows_after_a_checkpoint_are_removed_and_its_own_is_kept(folder: RunFolder):
    for step in range(4):
        folder.append_row(MetricsRow(step=step, data={"x": step}))

    folder.rewind(MetricsRow(step=2, data={"x": -1.0}))

    assert [(row.step, row.data["x"]) for row in folder.rows()] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_a_row_that_was_lost_between_checkpoint_and_file_is_added(folder: RunFolder):
    folder.append_row(MetricsRow(step=1, data={"x": 1.0}))

    folder.rewind(MetricsRow(step=2, data={"x": 2.0}))

    assert [row.step for row in folder.rows()] == [1, 2]


def test_without_a_checkpoint_every_row_goes(folder: RunFolder):
    folder.append_row(MetricsRow(step=0, data={}))

    folder.rewind(None)

    assert folder.rows() == []


def test_a_row_that_is_being_written_is_not_read_yet(folder: RunFolder):
    folder.append_row(MetricsRow(step=1, data={}))
    with folder.metrics_file.open("a") as file:
        file.write('{"step": 2, "da')

    assert [row.step for row in folder.rows()] == [1]


def test_a_new_runs_owner_is_whoever_made_it_and_another_process_may_take_it(folder: RunFolder):
    assert folder.owner() == Owner.of(os.getpid())

    folder.write_owner(Owner.of(1))

    assert folder.owner() == Owner.of(1)
