"""Runs on services that run elsewhere: whose paths they have, how they are followed and resumed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trackway.deploy.cli import app
from trackway.deploy.deployment.attach import folder_here
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs import session
from trackway.deploy.runs.losses import active_runs
from trackway.deploy.runs.prepare import configured, localised, placed
from trackway.deploy.runs.session import RunSession
from trackway.deploy.terminal.progress import RunBar
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import OwnCode
from trackway.wire.trainer import BackendSummary, RunInfo, RunState

pytestmark = pytest.mark.slow  # five real services

PROJECT = """\
defaults: [tiny_demo, _self_]
actor_rollout_ref:
  model: {path: /models/tiny}
  actor: {optim: {lr: 1e-3}}
  rollout: {trace: {backend: null}}
data: {train_files: [/data/train.parquet], val_files: [/data/test.parquet]}
trainer: {logger: [console], experiment_name: of-a-project}
trackway: {code_path: /code, seed: 1}
"""
TURNS = "actor_rollout_ref.rollout.multi_turn"
MODEL = "actor_rollout_ref.model.path"


def advance(folder: RunFolder, *states: RunState, **changes: object) -> None:
    for state in states:
        folder.move(state)
    folder.update(**changes)


def quiet(info: RunInfo) -> None:
    """Nobody looks."""


def here(there: Deployment) -> Deployment:
    """As if its services had been started on this machine."""
    return there.model_copy(update={"attached": False})


def test_paths_of_the_services_volume_stay_as_they_are(there: Deployment, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Qwen").mkdir()
    words = ["data.train_files=[/data/a.parquet,'s3://bucket/b.parquet']", f"{TURNS}.tool_config_path=/data/tools.yaml"]
    words += ["trainer.resume_from_path=/outputs/run/global_step_3"]
    here = compose([*words, f"{MODEL}=/models/tiny"])
    hub = compose([*words, f"{MODEL}=Qwen/Qwen2.5-3B-Instruct"])

    assert (placed(here, there), placed(hub, there)) == (here, hub)
    assert placed(here, None) == localised(here)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.train_files=[/data/a.parquet,b.parquet]", "data.train_files"),
        ("data.val_files='~/b.parquet'", "data.val_files"),
        (f"{TURNS}.tool_config_path=tools.yaml", f"{TURNS}.tool_config_path"),
        (f"{TURNS}.function_tool_path=./tools.py", f"{TURNS}.function_tool_path"),
        ("trainer.resume_from_path=run/global_step_3", "trainer.resume_from_path"),
        (f"{MODEL}=./model", MODEL),
        (f"{MODEL}='~/model'", MODEL),
        (f"{MODEL}=model", MODEL),
    ],
)
def test_a_path_of_this_machine_is_refused_by_its_key(
    word: str, key: str, there: Deployment, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    expected = (
        rf"{key}: expected an absolute path on the services' volume or a URL, got .*; .*: copy the file to their volume"
    )
    with pytest.raises(UserError, match=expected):
        placed(compose([word]), there)


def test_an_interrupted_run_is_waited_for_elsewhere_and_an_error_here(there: Deployment, folder: RunFolder) -> None:
    advance(folder, RunState.RUNNING, RunState.FAILED, interrupted=True)
    seen: list[RunState] = []

    def show(info: RunInfo) -> None:
        seen.append(info.state)
        if info.state is RunState.FAILED:  # the service goes on with it
            advance(folder, RunState.STARTING, RunState.RUNNING, RunState.FINISHED, interrupted=False)

    with pytest.raises(UserError, match=f"resume it with `trackway train --resume {folder.name}`"):
        RunSession(here(there)).follow(folder.name, quiet)
    assert RunSession(there).follow(folder.name, show).state is RunState.FINISHED
    assert seen == [RunState.FAILED, RunState.FINISHED]


def test_an_interrupted_run_that_stays_away_is_no_success(there: Deployment, folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setattr(session, "OUTAGE_DEADLINE_S", 0.0)
    advance(folder, RunState.RUNNING, RunState.STOPPING)
    folder.move(RunState.STOPPED, "interrupted after step 5; it can be resumed", interrupted=True)
    with pytest.raises(UserError) as away:
        RunSession(there).follow(folder.name, quiet)
    assert str(away.value) == (
        f"run {folder.name} was interrupted and was not resumed automatically (interrupted after step 5; it can be "
        f"resumed); resume it with `trackway train --resume {folder.name}`; its log is {folder.log}"
    )
    folder.update(interrupted=False)
    assert RunSession(there).follow(folder.name, quiet).state is RunState.STOPPED


def test_status_says_what_a_backend_lacks_of_each_run(there: Deployment, folder: RunFolder) -> None:
    lacking = BackendSummary(
        backend="mlflow", rows_waiting=2, waits_for="HTTP 503", feedback_lost=1, lost_because="401"
    )
    advance(folder, RunState.RUNNING, RunState.FINISHED, tracking=[lacking])

    name = folder.name
    assert [note for note in active_runs(there)[1] if name in note] == [
        f"run {name}: 2 rows of metrics not yet in MLflow (HTTP 503): kept on disk and sent later",
        f"run {name}: 1 value of feedback lost for MLflow: 401",
    ]


def test_status_says_where_the_rollouts_of_an_active_run_are(there: Deployment, folder: RunFolder) -> None:
    account = {"submitted": 8, "used": 4, "running": 4}
    advance(folder, RunState.RUNNING, rollout_states=account)

    assert f"run {folder.name}: 8 rollouts submitted: 4 used, 4 running" in active_runs(there)[1]

    advance(folder, RunState.FINISHED)
    assert [note for note in active_runs(there)[1] if folder.name in note] == []


def test_status_has_a_line_for_each_active_run_with_its_policy(elsewhere, there: Deployment, folder: RunFolder) -> None:
    def status(*words: str) -> str:
        return (
            CliRunner().invoke(app, ["status", *words, "--outputs", str(there.outputs)], catch_exceptions=False).stdout
        )

    folder.update(total_steps=4)
    beside = elsewhere.hold("beside", folder.config(), RunState.RUNNING)
    beside.update(policy="beside", step=1, total_steps=4)
    lines = [line for line in status().splitlines() if line.startswith("run ")]
    trainer = next(service for service in json.loads(status("--json")) if service["service"] == "trainer")
    beside.move(RunState.FINISHED)
    left = [line for line in status().splitlines() if line.startswith("run ")]

    assert lines == [
        "run beside: running, step 1 of 4, policy beside",
        f"run {folder.name}: starting, step 0 of 4, the default policy",
    ]
    assert [(info["run"], info["policy"]) for info in trainer["runs"]] == [("beside", "beside"), (folder.name, None)]
    assert left == lines[1:]


@pytest.mark.parametrize("words", [["try", "ROWS"], ["evaluate", "running", "--data", "ROWS"]])
def test_rollouts_that_another_runs_functions_would_score_are_refused(
    words: list[str], there: Deployment, tmp_path: Path, monkeypatch
) -> None:
    async def loaded(urls: object) -> dict[str, OwnCode]:
        return {"reward": OwnCode(digest="0" * 16, files=["functions-mine.json"])}

    monkeypatch.setattr("trackway.deploy.checks.run.loaded_code", loaded)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2?", "answer": 4}')
    given = [word.replace("ROWS", str(rows)) for word in words]

    with pytest.raises(UserError, match="without functions of another Python process, got those of mine; end it there"):
        CliRunner().invoke(app, [*given, "--outputs", str(there.outputs)], catch_exceptions=False)


def test_a_service_that_moves_is_waited_for(elsewhere, there: Deployment, folder: RunFolder, monkeypatch) -> None:
    def move(info: RunInfo) -> None:
        if info.state is RunState.STARTING:
            elsewhere.failing = 7  # more than one call tries
            advance(folder, RunState.RUNNING, RunState.FINISHED)

    assert RunSession(there).follow(folder.name, move).state is RunState.FINISHED
    assert elsewhere.failing == 0

    monkeypatch.setattr(session, "OUTAGE_DEADLINE_S", 0.0)
    elsewhere.away = {"trainer"}
    with pytest.raises(
        UserError, match=f"no answer after 5 attempts .*follow it with `trackway train --resume {folder.name}`"
    ):
        RunSession(there).follow(folder.name, quiet)


def test_resuming_an_active_run_follows_it(there: Deployment, folder: RunFolder) -> None:
    advance(folder, RunState.RUNNING, step=3)
    assert RunSession(there).resume(folder.name) == folder.info()


@pytest.mark.parametrize(
    "folder", [["actor_rollout_ref.rollout.trace.backend=null", "trainer.logger=[console]"]], indirect=True
)
def test_a_run_that_is_stopping_is_resumed_once_it_has_stopped(there: Deployment, folder: RunFolder) -> None:
    advance(folder, RunState.RUNNING, RunState.STOPPING)
    seen: list[RunState] = []

    def stop(info: RunInfo) -> None:
        seen.append(info.state)
        if info.state is RunState.STOPPING:
            advance(folder, RunState.STOPPED)

    changes = {"trainer.n_gpus_per_node": 8}
    resumed = RunSession(there).resume(folder.name, stop, skip_damaged=True, changes=changes)
    with pytest.raises(
        UserError, match=f"n_gpus_per_node: expected a run that has ended, got run {folder.name}, which is"
    ):
        RunSession(there).resume(folder.name, quiet, changes=changes)
    command = Path(f"/proc/{folder.owner().pid}/cmdline").read_text()
    ended = RunSession(there).stop(folder.name, quiet)  # its learner, which the service has started
    assert (seen, resumed.state, ended.state) == (
        [RunState.STOPPING, RunState.STOPPED],
        RunState.STARTING,
        RunState.STOPPED,
    )
    assert command.endswith("\0--skip-damaged\0")
    assert folder.config().trainer.n_gpus_per_node == 8


def test_a_run_that_is_interrupted_goes_on_by_itself(there: Deployment, folder: RunFolder) -> None:
    advance(folder, RunState.RUNNING, RunState.STOPPING, interrupted=True)
    assert RunSession(there).resume(folder.name) == folder.info()


def test_a_run_that_finishes_while_it_stops_is_done(there: Deployment, folder: RunFolder, monkeypatch) -> None:
    advance(folder, RunState.RUNNING, RunState.STOPPING)

    def finish(bar: RunBar, info: RunInfo) -> None:
        if info.state is RunState.STOPPING:
            advance(folder, RunState.FINISHED)

    monkeypatch.setattr(RunBar, "show", finish)
    told = CliRunner().invoke(app, ["train", "--resume", folder.name, "--outputs", str(there.outputs), "--json"])
    assert (told.exit_code, json.loads(told.stdout)["state"]) == (0, "finished")


@pytest.fixture
def of_project(elsewhere, there: Deployment, tmp_path: Path, monkeypatch) -> Iterator[RunFolder]:
    """A run that was started in the working folder, a project, with another seed."""
    monkeypatch.chdir(tmp_path)
    Path("trackway.yaml").write_text(PROJECT)
    made = elsewhere.hold(f"of-{tmp_path.name}", configured(["trackway.seed=2"], None, "default", there))
    advance(made, RunState.RUNNING)
    yield made
    if not made.ended():
        made.move(RunState.FAILED)


def resumed(there: Deployment, folder: RunFolder, *words: str) -> tuple[str, str]:
    """The error of the command, which is empty without one, and what it printed beside its result."""
    told = CliRunner().invoke(app, ["train", "--resume", folder.name, "--outputs", str(there.outputs), *words])
    if told.exception and not isinstance(told.exception, UserError):
        raise told.exception
    return str(told.exception or ""), " ".join(told.stderr.split())


def test_a_resumed_run_says_that_it_does_not_read_the_projects_file_and_takes_changes_of_the_command_line(
    there: Deployment, of_project: RunFolder, monkeypatch
) -> None:
    Path("trackway.yaml").write_text(PROJECT.replace("trackway: {", "trackway: {learner_ranks: 3, "))
    advance(of_project, RunState.STOPPING, RunState.STOPPED)
    monkeypatch.setattr(RunSession, "follow", RunSession.stop)  # its learner, which the service has started

    error, shown = resumed(there, of_project, "trackway.rank_timeout_s=8")

    now, name = of_project.config().trackway, of_project.name
    assert error == ""
    assert f"run {name} continues with its own settings, not with trackway.yaml; give changes as key=value" in shown
    assert (now.learner_ranks, now.rank_timeout_s, now.seed) == (None, 8, 2)


def test_a_run_that_does_not_end_says_what_helps(there: Deployment, folder: RunFolder, monkeypatch) -> None:
    monkeypatch.setattr(session, "STOP_DEADLINE_S", -1.0)
    advance(folder, RunState.RUNNING, RunState.STOPPING)
    again = f"`trackway train --resume {folder.name}` waits again, then resumes it"
    with pytest.raises(UserError, match=f"expected it to stop within .* s, but it is still running; {again}$"):
        RunSession(there).resume(folder.name)
    with pytest.raises(UserError, match=f"{again}; or stop it together with its services: `trackway down`$"):
        RunSession(here(there)).resume(folder.name)


def test_another_run_in_a_folder_of_that_name_is_not_taken_for_it(folder: RunFolder) -> None:
    info = folder.info()
    assert folder_here(info) == folder
    assert folder_here(info.model_copy(update={"uid": "another"})) is None


def test_a_lost_run_is_an_error_at_once(there: Deployment) -> None:
    with pytest.raises(TrackwayError) as lost:
        RunSession(there).follow("nothing", quiet)
    assert lost.value.code is ErrorCode.NOT_FOUND
