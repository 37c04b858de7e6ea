"""`trackway clean`: what can be made again goes, runs and traces stay unless asked for, nothing in use is touched."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trackway.deploy.cli import app
from trackway.run_config import RunConfig
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.trainer import RunState


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A finished run in an outputs folder with weights, logs, traces and a damaged checkpoint."""
    for file in ("weights/v1/model", ".deployment/ray.log", "mlflow/mlflow.db", "spool/a.spans"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("x" * 10)
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(), ServiceUrls(agent_url="", tools_url="", reward_url="", weights_url=""))
    (folder.checkpoints / "damaged_global_step_2").mkdir()
    (folder.checkpoints / "global_step_1").mkdir()
    folder.move(RunState.RUNNING)
    folder.move(RunState.FINISHED)
    return folder


def clean(outputs: Path, *words: str) -> str:
    result = CliRunner().invoke(app, ["clean", "--outputs", str(outputs), *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def names(outputs: Path) -> set[str]:
    return {path.name for path in outputs.iterdir()}


def test_what_can_be_made_again_is_removed_and_the_rest_stays(run: RunFolder) -> None:
    outputs = run.path.parent

    assert clean(outputs, "--yes").split() == ["removed", "20", "B", "from", str(outputs)]
    assert names(outputs) == {"run", "mlflow", "spool"}
    assert [path.name for path in run.checkpoints.iterdir()] == ["global_step_1"]
    assert clean(outputs, "--yes").startswith("nothing to remove")


def test_all_removes_runs_and_traces_and_no_other_file(run: RunFolder) -> None:
    (run.path.parent / "data").mkdir()
    (run.path.parent / "thesis.tex").touch()

    clean(run.path.parent, "--all", "--yes")

    assert names(run.path.parent) == {"data", "thesis.tex"}


def test_without_a_terminal_nothing_is_removed_unasked(run: RunFolder) -> None:
    before = names(run.path.parent)

    with pytest.raises(UserError, match="expected --yes to remove 20 B from"):
        clean(run.path.parent)
    assert names(run.path.parent) == before


def test_an_active_run_is_left_alone(run: RunFolder) -> None:
    active = RunFolder(run.path.with_name("active"))
    active.create(run.config(), run.services())  # owned by this process

    with pytest.raises(UserError, match="run active is active in"):
        clean(run.path.parent, "--all", "--yes")
    assert active.info().state is RunState.STARTING


def test_a_folder_that_is_no_outputs_folder_is_refused(tmp_path: Path) -> None:
    for folder in ("data", "weights", "mlflow"):
        (tmp_path / folder).mkdir()

    with pytest.raises(UserError, match="expected an outputs folder of trackway"):
        clean(tmp_path, "--all", "--yes")
    assert names(tmp_path) == {"data", "weights", "mlflow"}
