"""The demo on services that run elsewhere: which run it starts, follows or resumes, and what it makes of it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.cli import app
from trackway.deploy.commands.demo import _print_end
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local import up
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import demo
from trackway.deploy.runs.demo import PhaseTimes, RunOutput, demo_words, name_of, summarise, write_rows
from trackway.deploy.runs.found import find_run
from trackway.deploy.runs.prepare import prepare, to_start
from trackway.deploy.terminal.progress import RunBar
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.wire.trainer import BackendSummary, MetricsRow, RunInfo, RunState
from trackway.wire.trajectory import StopReason, Tags, Trajectory

pytestmark = pytest.mark.slow  # five real services

MODEL = "actor_rollout_ref.model.path"
ACCURACY = "val-core/trackway/tiny_math/acc/mean@1"


@pytest.mark.parametrize(
    ("names", "state", "expected"),
    [
        ([], RunState.FINISHED, "seed0"),
        (["seed01", "seed1", "seed0-x", "other"], RunState.FINISHED, "seed0"),
        (["seed0"], RunState.FINISHED, "seed0-2"),
        (["seed0"], RunState.FAILED, "seed0-2"),
        (["seed0-10", "seed0-9", "seed0", "seed01-20"], RunState.FINISHED, "seed0-11"),
        (["seed0-10", "seed0"], RunState.RUNNING, "seed0-10"),
        (["seed0"], RunState.STOPPING, "seed0"),
        (["seed0"], RunState.STOPPED, "seed0"),
    ],
)
def test_a_demo_goes_on_with_the_newest_run_of_its_seed_until_that_has_ended(
    names: list[str], state: RunState, expected: str
) -> None:
    assert name_of(0, [RunInfo(run=name, state=state) for name in names]) == expected


def test_a_demo_goes_on_with_a_run_that_was_interrupted() -> None:
    assert name_of(0, [RunInfo(run="seed0", state=RunState.FAILED, interrupted=True)]) == "seed0"


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
    assert serve_config.args_of(made[0], "trainer")["standby"] is True
    assert said in " ".join(told.stderr.split())


def test_a_demo_asks_for_nothing_that_its_engine_cannot_do_and_takes_its_model(tmp_path: Path) -> None:
    model, config = str(TINY_MODEL), serve_config.load(UpSettings.read().config)
    [rollout] = [app for app in config["applications"] if app["name"] == "rollout"]
    rollout["args"]["engine"] = "mine:Engine"
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    words = demo_words(3, "seed3", tmp_path, [FREE, "actor_rollout_ref.rollout.name=null", f"{MODEL}={model}"])
    subject = prepare(words, None, "tiny_demo", UpSettings(config=tmp_path / "serve.yaml", outputs=tmp_path))
    settings, started = to_start(subject)

    assert subject.config.actor_rollout_ref.rollout.free_cache_engine is None
    assert settings.model_path == Path(model)
    assert serve_config.args_of(started, "rollout")["engine"] == "mine:Engine"


def test_a_demo_that_this_machine_cannot_run_leaves_an_earlier_one_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    told = CliRunner().invoke(app, ["demo", "--outputs", str(tmp_path / "demo"), "trackway.code_path=gone"])

    assert "trackway.code_path: expected a folder, got " in str(told.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def demo_there(there: Deployment, seed: int, *words: str) -> Result:
    """`trackway demo --attached`."""
    return CliRunner().invoke(app, ["demo", "--attached", "--outputs", str(there.outputs), "--seed", f"{seed}", *words])


NAMED = ["data.train_files=/volume/train.parquet", "data.val_files=/volume/test.parquet"]


def test_a_demo_that_somebody_stopped_is_no_success(elsewhere, there: Deployment, monkeypatch) -> None:
    config = prepare([*NAMED, f"{MODEL}=/models/tiny"], None, "tiny_demo", UpSettings(outputs=there.outputs)).config
    active = elsewhere.hold("seed15", config, RunState.RUNNING)
    active.update(step=3, total_steps=30)

    def stop(bar: RunBar, info: RunInfo) -> None:
        if info.state is RunState.RUNNING:
            active.move(RunState.STOPPING)
            active.move(RunState.STOPPED)

    monkeypatch.setattr(RunBar, "show", stop)
    told = demo_there(there, 15, "--model-path", "/models/tiny", *NAMED)

    assert str(told.exception) == (
        f"run seed15 was stopped at step 3 of 30; resume it with `trackway train --resume seed15 --outputs "
        f"{there.outputs}`"
    )
    assert [path.name for path in elsewhere.volume.glob("seed15*")] == ["seed15"]  # it was followed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model-path=/m"], "--data-dir: expected a folder on the services' volume for the demo's dataset, got none"),
        (["--data-dir=/data"], "--model-path: expected the model's path or id as the services see it, got none"),
        (["--model-path=/m", "--data-dir=data"], "data.train_files: expected an absolute path on the services' volume"),
        (["--model-path=/m", "--data-dir={file}"], "--data-dir: expected a folder on the services' volume that is wri"),
    ],
)
def test_what_the_demo_lacks_is_said_before_anything_is_written(
    there: Deployment, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "file").touch()

    told = demo_there(there, 13, *(word.format(file=tmp_path / "file") for word in words))

    assert str(told.exception).startswith(message)
    assert list(tmp_path.rglob("tiny*")) == []


def test_rows_that_are_there_already_are_named_instead(tmp_path: Path) -> None:
    words = demo_words(14, "seed14", None, [f"+{NAMED[0]}", NAMED[1], f"{MODEL}=/volume/model"])
    config = prepare(words, None, "tiny_demo", UpSettings(outputs=tmp_path)).config

    assert (config.data.train_files, config.data.val_files) == (["/volume/train.parquet"], ["/volume/test.parquet"])
    assert (config.actor_rollout_ref.model.path, config.trackway.seed) == ("/volume/model", 14)
    write_rows(14, None, words)


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


def test_the_summary_counts_what_the_runs_folder_shows(elsewhere, there: Deployment, folder: RunFolder) -> None:
    info, clock = made_run(folder), PhaseTimes(time.monotonic())

    lost = BackendSummary(backend="mlflow", feedback_lost=5, lost_because="no room on disk")
    info = info.model_copy(update={"tracking": [lost]})
    summary, [no_mlflow] = summarise(there, folder, info, clock)

    counts = (summary.trajectories, summary.traced, summary.complete_traces, summary.failed_trajectories)
    assert counts == (3, 3, None, 0)
    assert "the address of their MLflow is unknown here" in no_mlflow
    assert (summary.accuracy_before, summary.accuracy_after, summary.steps) == (0.25, 0.75, 2)
    assert summary.undelivered == ["5 values of feedback lost for MLflow: no room on disk"]
    assert demo.sentence(summary) == (
        "accuracy on held-out problems 0.25 -> 0.75 in 2 steps; 3 trajectories, 0 failed; 3 traced"
    )
    assert (there.outputs / "summary.json").read_text() == summary.model_dump_json(indent=2)
    assert find_run(there.outputs, folder.name).folder.path == elsewhere.volume / folder.name


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
    summary, [note] = summarise(there, folder, info, PhaseTimes(time.monotonic()))
    assert summary.complete_traces is None
    assert note.startswith("traces were not checked: MLflow at http://127.0.0.1:1 refused, or did not answer")


def test_a_demo_ends_with_the_command_that_opens_its_run(
    there: Deployment, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    info = made_run(folder)
    summary = RunOutput.of(folder).summary(info, PhaseTimes(0.0), "sqlite:///mlflow.db", None)

    _print_end(summary, info, there)

    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"console        trackway console --outputs {folder.path.parent}"
