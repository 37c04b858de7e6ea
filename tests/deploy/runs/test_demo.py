"""The demo on services that run elsewhere: which run it starts, follows or resumes, and what it makes of it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.cli import app
from trackway.deploy.commands.demo import _print_end, console_of
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.attach import runs_folder
from trackway.deploy.deployment.progress import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local import up
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import demo, launch
from trackway.deploy.runs.demo import Demo, PhaseTimes, RunOutput, newest_of, summarise
from trackway.system.user_error import UserError
from trackway.trainer.config import RunConfig
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.wire.trainer import BackendSummary, MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import StopReason, Tags, Trajectory

pytestmark = pytest.mark.slow  # five real services

MODEL = "actor_rollout_ref.model.path"
ACCURACY = "val-core/trackway/tiny_math/acc/mean@1"


def test_the_demos_runs_are_numbered_by_their_seed() -> None:
    def known(*names: str) -> list[RunInfo]:
        return [RunInfo(run=name, state=RunState.FINISHED) for name in names]

    def found(seed: int, *names: str) -> tuple[str | None, str]:
        newest, free = newest_of(seed, known(*names))
        return newest and newest.run, free

    assert found(0) == (None, "seed0")
    assert found(0, "seed01", "seed1", "seed0-x", "other") == (None, "seed0")
    assert found(0, "seed0") == ("seed0", "seed0-2")
    assert found(0, "seed0-10", "seed0-9", "seed0", "seed01-20") == ("seed0-10", "seed0-11")


FREE = "actor_rollout_ref.rollout.free_cache_engine=true"


@pytest.mark.parametrize(
    ("words", "sleeps", "said"),
    [
        (
            [FREE],
            True,
            f"{FREE.replace('true', 'True')}: on, the weights of the engine are in a file while the learner",
        ),
        ([FREE, "actor_rollout_ref.rollout.max_num_seqs=7"], True, ": on, the weights of the engine are in a file"),
        (["trainer.total_training_steps=2"], None, ""),
    ],
)
def test_the_demos_services_are_made_for_its_overrides(
    words: list[str], sleeps: bool | None, said: str, tmp_path: Path, monkeypatch
) -> None:
    made: list[dict[str, Any]] = []

    def bring_up(settings: UpSettings, report: Report, config: dict[str, Any] | None) -> None:
        made.append(config or serve_config.load(settings.config))
        raise UserError("far enough")

    monkeypatch.setattr(up, "bring_up", bring_up)
    told = CliRunner().invoke(app, ["demo", "--outputs", str(tmp_path / "demo"), *words])

    args = serve_config.args_of(made[0], "rollout")
    assert (str(told.exception), args.get("enable_sleep")) == ("far enough", sleeps)
    assert args["max_num_seqs"] == (7 if len(words) == 2 else 128)
    assert said in " ".join(told.stderr.split())


def test_a_demo_asks_for_nothing_that_its_engine_cannot_do_and_takes_its_model(tmp_path: Path) -> None:
    model, config = str(TINY_MODEL), serve_config.load(UpSettings.read().config)
    [rollout] = [app for app in config["applications"] if app["name"] == "rollout"]
    rollout["args"]["engine"] = "mine:Engine"
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    overrides = [FREE, "actor_rollout_ref.rollout.name=null", f"{MODEL}={model}"]
    services = demo.services_of(overrides, UpSettings.read(config=tmp_path / "serve.yaml"))

    assert services.overrides[3:] == ["actor_rollout_ref.rollout.free_cache_engine=null"]
    assert services.settings.model_path == Path(model)
    assert serve_config.args_of(services.serve_config, "rollout")["engine"] == "mine:Engine"


def test_a_demo_that_this_machine_cannot_run_leaves_an_earlier_one_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    told = CliRunner().invoke(app, ["demo", "--outputs", str(tmp_path / "demo"), "trackway.code_path=gone"])

    assert "trackway.code_path: expected a folder, got " in str(told.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def wanted(there: Deployment, seed: int, data_dir: Path | None, *overrides: str) -> Demo:
    return Demo(there, seed, data_dir, "/models/tiny", list(overrides))


def test_an_active_demo_is_followed_and_no_rows_are_written(elsewhere, there: Deployment, tmp_path: Path) -> None:
    ours = wanted(there, 11, tmp_path / "data")
    active = elsewhere.hold("seed11", ours._config("seed11"), RunState.RUNNING)
    info, told = ours.start()
    assert (info.run, told) == ("seed11", "run seed11 is running already; following it")
    assert not (tmp_path / "data").exists()
    active.move(RunState.FINISHED)


def test_a_stopped_demo_goes_on_only_if_it_is_the_same(elsewhere, there: Deployment, tmp_path: Path) -> None:
    ours = wanted(there, 12, tmp_path / "data")
    shorter = wanted(there, 12, tmp_path / "data", "trainer.total_training_steps=5")
    elsewhere.hold("seed12", ours._config("seed12"), RunState.RUNNING, RunState.STOPPING, RunState.STOPPED)
    newest, free = newest_of(12, demo.runs(there))
    assert newest is not None and free == "seed12-2"
    assert (ours._may_go_on(newest), shorter._may_go_on(newest)) == (True, False)
    stopping, finished = (
        newest.model_copy(update={"state": state}) for state in (RunState.STOPPING, RunState.FINISHED)
    )
    assert (ours._may_go_on(stopping), shorter._may_go_on(stopping)) == (True, False)
    hidden = newest.model_copy(update={"folder": "/nowhere/seed12"})
    assert (ours._may_go_on(finished), ours._may_go_on(hidden)) == (False, False)


def test_a_demo_that_is_being_stopped_is_to_go_on(elsewhere, there: Deployment, monkeypatch) -> None:
    words = ["+data.train_files=/volume/train.parquet", "data.val_files=/volume/test.parquet"]
    ours = wanted(there, 16, None, *words)
    stopping = elsewhere.hold("seed16", ours._config("seed16"), RunState.RUNNING, RunState.STOPPING)
    monkeypatch.setattr(launch, "STOP_DEADLINE_S", -1.0)
    with pytest.raises(UserError, match="run seed16: expected it to stop within"):
        ours.start()
    stopping.move(RunState.STOPPED)


def test_a_demo_that_somebody_stopped_is_no_success(there: Deployment, folder: RunFolder) -> None:
    folder.move(RunState.RUNNING, step=3, total_steps=30)

    def stop(info: RunInfo) -> None:
        if info.state is RunState.RUNNING:
            folder.move(RunState.STOPPING)
            folder.move(RunState.STOPPED)

    with pytest.raises(UserError, match="was stopped at step 3 of 30; repeat this command to resume"):
        wanted(there, 15, None).follow(folder.info(), stop)


def test_what_the_demo_lacks_is_said_before_anything_is_written(there: Deployment, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match="--data-dir: expected a folder on the services' volume for the demo's dataset"):
        wanted(there, 13, None).start()
    with pytest.raises(
        UserError, match="--model-path: expected the model's path or id as the services see it, got none"
    ):
        Demo(there, 13, tmp_path, None, []).start()
    with pytest.raises(UserError, match=r"data.train_files: expected an absolute path on the services' volume"):
        wanted(there, 13, Path("data")).start()
    assert list(tmp_path.glob("tiny*")) == []
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--data-dir: expected a folder .* that is writable from here, got .*/file"):
        wanted(there, 13, tmp_path / "file").start()


def test_rows_that_are_there_already_are_named_instead(there: Deployment) -> None:
    words = ["+data.train_files=/volume/train.parquet", "data.val_files=/volume/test.parquet", f"{MODEL}=/volume/model"]
    config: RunConfig = Demo(there, 14, None, None, words)._config("seed14")
    assert (config.data.train_files, config.data.val_files) == (["/volume/train.parquet"], ["/volume/test.parquet"])
    assert (config.actor_rollout_ref.model.path, config.trackway.seed) == ("/volume/model", 14)


def trajectory(number: int) -> Trajectory:
    """A traced one that did not fail."""
    return Trajectory(
        id=f"run/1/0/{number}",
        session_id="one",
        tags=Tags(experiment_name="run", step=1, sample_index=0, rollout_n=number),
        agent_name="tool_agent",
        data_source="tiny",
        stop_reason=StopReason.ANSWERED,
        trace_id=f"{number:032x}",
    )


def made_run(folder: RunFolder) -> RunInfo:
    """Two steps and two validations, with one failure, and nothing in MLflow."""
    counts = {"training/trajectories": 3.0, "training/left_out/error": 1.0}
    failed = {"training/rollout_failure/failed_trajectories": 1.0}
    for row in (
        MetricsRow(step=0, data={ACCURACY: 0.25, "val-aux/failed_trajectories": 0.0}),
        MetricsRow(step=1, data={**counts, **failed, "critic/score/mean": 0.5}),
        MetricsRow(step=2, data={**counts, **failed, ACCURACY: 0.75, "critic/score/mean": 0.6}),
    ):
        folder.append_row(row)
    write_trajectories(folder.path / "trajectories" / "step_1.parquet", [trajectory(n) for n in range(3)])
    folder.move(RunState.RUNNING)
    folder.move(RunState.FINISHED, step=2)
    return folder.info()


def test_the_summary_counts_what_the_volume_or_else_the_trainer_shows(
    elsewhere, there: Deployment, folder: RunFolder
) -> None:
    info, clock = made_run(folder), PhaseTimes(time.monotonic())

    near, [no_mlflow] = summarise(there, info, clock)
    lost = BackendSummary(backend="mlflow", feedback_lost=5, lost_because="no room on disk")
    away = info.model_copy(update={"folder": "/nowhere", "tracking": [lost]})
    far, [not_here] = summarise(there, away, clock)

    assert (near.trajectories, near.traced, near.complete_traces, near.failed_trajectories) == (3, 3, None, 0)
    assert (far.trajectories, far.traced, far.complete_traces, far.failed_trajectories) == (8, 0, None, 2)
    assert (
        "the address of their MLflow is unknown here" in no_mlflow and "/nowhere cannot be read from here" in not_here
    )
    assert {(summary.accuracy_before, summary.accuracy_after, summary.steps) for summary in (near, far)} == {
        (0.25, 0.75, 2)
    }
    assert (near.undelivered, far.undelivered) == ([], ["5 values of feedback lost for MLflow: no room on disk"])
    assert demo.sentence(far) == (
        "accuracy on held-out problems 0.25 -> 0.75 in 2 steps; 8 trajectories, 2 failed; 0 traced"
    )
    assert (there.outputs / "summary.json").read_text() == far.model_dump_json(indent=2)
    assert runs_folder(there.outputs) == elsewhere.volume


def test_only_validations_that_ran_are_in_the_sentence(there: Deployment, folder: RunFolder) -> None:
    """As with `trainer.val_before_train=false`, and with a test frequency beyond the last step."""
    info, clock = made_run(folder), PhaseTimes(time.monotonic())
    output = RunOutput.of(folder)
    before, *trained = output.rows
    summaries = {
        said: replace(output, rows=rows).summary(info, clock, "", None)
        for said, rows in {
            "accuracy on held-out problems 0.75 in 2 steps": trained,
            "accuracy on held-out problems 0.25 in 2 steps": [before, trained[0]],
            "no accuracy was measured in 2 steps": trained[:1],
        }.items()
    }

    assert [(summary.accuracy_before, summary.accuracy_after) for summary in summaries.values()] == [
        (None, 0.75),
        (0.25, None),
        (None, None),
    ]
    for said, summary in summaries.items():
        assert demo.sentence(summary).partition(";")[0] == said


def test_an_mlflow_that_does_not_answer_costs_the_count_only(there: Deployment, folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    info = made_run(folder).model_copy(update={"experiment_id": "1", "mlflow_uri": "http://127.0.0.1:1"})
    summary, [note] = summarise(there, info, PhaseTimes(time.monotonic()))
    assert summary.complete_traces is None
    assert note.startswith("traces were not checked: MLflow at http://127.0.0.1:1 refused, or did not answer")


def test_a_demo_ends_with_the_command_that_opens_its_run(
    there: Deployment, folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = there.model_copy(update={"attached": False, "outputs": tmp_path / "demo"})
    info = made_run(folder)
    summary = RunOutput.of(folder).summary(info, PhaseTimes(0.0), "sqlite:///mlflow.db", None)
    last = []

    for deployment in (here, there):
        _print_end(summary, info, deployment)
        last.append(capsys.readouterr().out.splitlines()[-1])

    assert last == [
        f"console        trackway console --outputs {tmp_path / 'demo'}",
        f"console        trackway console --outputs {folder.path.parent}",
    ]


def test_a_demo_on_a_volume_that_is_not_here_says_where_its_console_can_start(
    there: Deployment, folder: RunFolder
) -> None:
    info = made_run(folder).model_copy(update={"folder": "/volume/outputs/seed0"})

    command = console_of(info, there)

    assert command == "trackway console --outputs /volume/outputs   where the services' volume is mounted"
