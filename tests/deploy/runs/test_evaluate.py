"""`trackway evaluate` from a project's folder, with the tiny model in this process."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from tests.services.evaluation.rollouts import rollout
from tests.services.trainer.learner_settings import learner_config
from tests.waiting import until
from trackway.deploy.commands.new_project import write_project
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import evaluate
from trackway.deploy.runs.evaluate import EvaluationRun, Options
from trackway.deploy.runs.prepare import configured, prepare
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.learner.learner import Learner
from trackway.run_config import resolve
from trackway.system.files import StorageError
from trackway.system.process import UserError
from trackway.trainer.data import make_tiny
from trackway.trainer.run_state.checkpoint import save_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = pytest.mark.slow

OUTPUTS = Path("outputs")
SCRIPT = Path(__file__).parents[3] / "examples" / "agents" / "openai_script.py"
RECORDING = """
import json

from reward import compute_score as original


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open("scored.jsonl", "a") as file:
        file.write(json.dumps([data_source, solution_str, ground_truth, extra_info], sort_keys=True) + "\\n")
    return original(data_source, solution_str, ground_truth, extra_info)
"""
OTHER_SCORE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 7"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new project, which is the working folder from now on."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_project(tmp_path / "sums", "calculator")
    monkeypatch.chdir(tmp_path / "sums")
    return tmp_path / "sums"


def prepared(*overrides: str, **options: object) -> EvaluationRun:
    chosen = Options(**{"rows": Path("rows.jsonl"), "limit": 5, **options})
    return evaluate.prepare(str(UpSettings.read().model_path), chosen, [*overrides], None, "default", OUTPUTS)


def evaluated(prepared: EvaluationRun, progress: Callable[..., None] = lambda rollouts, left: None) -> Evaluation:
    findings, rows = prepared.check(lambda name, state: None)
    findings.refuse()
    assert rows is not None
    return prepared.run(rows, lambda name, state: None, progress)


def test_an_evaluation_is_a_run_that_only_validated_and_is_the_same_again(project: Path):
    first = evaluated(prepared(n=2, name="first"))
    evaluated(prepared(n=2, name="again"))

    assert first.summary is not None and (first.summary.tasks, first.summary.rollouts) == (5, 10)
    one, other = (EvaluationStore(OUTPUTS / name).trajectories() for name in ("first", "again"))
    assert [found.response_ids for found in one] == [found.response_ids for found in other]
    info = RunFolder(OUTPUTS / "first").info()
    assert (info.state, info.run) == (RunState.FINISHED, "first")
    assert info.metrics["val-core/sums/acc/mean@2"] == pytest.approx(first.summary.pass_at[1].value)
    rows = [json.loads(line) for line in (OUTPUTS / "first" / "tasks.jsonl").read_text().splitlines()]
    assert [row["sample_index"] for row in rows] == [found.tags.sample_index for found in one[::2]]
    assert sum(row["pass@2"] for row in rows) / 5 == pytest.approx(first.summary.pass_at[2].value)
    assert sum(row["tokens"] for row in rows) == first.summary.tokens


def test_a_runs_checkpoint_and_the_model_it_started_from_are_evaluated_with_its_settings(project: Path):
    model = UpSettings.read().model_path
    run = RunFolder(OUTPUTS / "my-run")
    run.path.mkdir(parents=True)
    files = {"data.val_files": [str(project / "rows.jsonl")], "trackway.code_path": str(project)}
    words = [f"{key}={value}" for key, value in files.items()]
    config = configured([f"actor_rollout_ref.model.path={model}", *words], None, "default")
    run.write_config(config)
    learner = Learner(learner_config(model))
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            parameter.zero_()
    save_checkpoint(run.checkpoints, 3, learner.save, {})

    options = Options(n=2, limit=3)
    newest, first = (
        evaluate.prepare("my-run", replace(options, step=step), [], None, "default", OUTPUTS) for step in (None, 0)
    )
    evaluated(newest)
    evaluated(first)

    assert (newest.evaluation.name, first.evaluation.name) == ("eval-my-run-3", "eval-my-run-0")
    zeros, began = (EvaluationStore(OUTPUTS / found.evaluation.name).trajectories() for found in (newest, first))
    base = evaluated(prepared(n=2, limit=3, name="base"))
    assert [found.response_ids for found in began] == [
        found.response_ids for found in EvaluationStore(OUTPUTS / base.name).trajectories()
    ]
    assert all(found.response_ids != other.response_ids for found, other in zip(zeros, began, strict=True))
    assert not (OUTPUTS / "eval-my-run-3" / "model").exists()
    with pytest.raises(UserError, match="expected a checkpoint of step 7 of run 'my-run', got 3; give another --step"):
        evaluate.prepare("my-run", replace(options, step=7), [], None, "default", OUTPUTS)


def test_a_session_agent_is_evaluated_with_a_model_and_with_a_run(project: Path, monkeypatch: pytest.MonkeyPatch):
    """The agent is a program that only knows OpenAI's SDK, and is started for each rollout."""
    monkeypatch.setenv("TRACKWAY_EXTERNAL__COMMAND", json.dumps([sys.executable, str(SCRIPT)]))
    model = str(UpSettings.read().model_path)
    make_tiny(project / "tiny", train_size=2, test_size=2, seed=0, agent_name="external")
    run = RunFolder(OUTPUTS / "trained")
    run.path.mkdir(parents=True)
    words = [f"actor_rollout_ref.model.path={model}", f"data.val_files={project}/tiny/test.parquet"]
    run.write_config(configured(words, None, "tiny_demo"))
    save_checkpoint(run.checkpoints, 1, Learner(learner_config(Path(model))).save, {})

    options = Options(Path("tiny/test.parquet"), n=2, limit=2)
    with_model = evaluated(evaluate.prepare(model, options, [], None, "tiny_demo", OUTPUTS))
    with_run = evaluated(evaluate.prepare("trained", Options(n=2, limit=2), [], None, "default", OUTPUTS))

    assert with_model.summary is not None and with_run.summary is not None
    assert (with_model.summary.rollouts, with_model.summary.failed) == (4, 0)
    assert (with_run.summary.rollouts, with_run.summary.failed) == (4, 0)
    one, other = (EvaluationStore(OUTPUTS / found.name).trajectories() for found in (with_model, with_run))
    assert {found.agent_name for found in (*one, *other)} == {"external"}
    assert all(found.response_ids and found.reward for found in one)
    assert [found.response_ids for found in one] == [found.response_ids for found in other]  # the checkpoint is equal


def test_a_run_of_sft_takes_its_reward_from_the_command_line_or_a_file(project: Path):
    run, model = RunFolder(OUTPUTS / "taught"), UpSettings.read().model_path
    run.path.mkdir(parents=True)
    words = [f"model.path={model}", f"data.val_files={project / 'conversations.jsonl'}", "data.max_length=64"]
    run.write_config(configured(words, None, "sft"))
    save_checkpoint(run.checkpoints, 3, Learner(learner_config(model)).save, {})
    (project / "seven.py").write_text(OTHER_SCORE)
    (project / "more.yaml").write_text("custom_reward_function: {path: seven.py}\ndata: {max_response_length: 7}\n")

    def taught(*overrides: str, config: Path | None = None, name: str = "default") -> EvaluationRun:
        return evaluate.prepare("taught", Options(Path("rows.jsonl"), limit=2), [*overrides], config, name, OUTPUTS)

    evaluated(taught("custom_reward_function.path=seven.py", "data.max_response_length=9"))
    evaluated(taught(config=Path("more.yaml")))

    for name, most in (("eval-taught-3", 9), ("eval-taught-3-2", 7)):
        trajectories = EvaluationStore(OUTPUTS / name).trajectories()
        assert [found.reward and found.reward.score for found in trajectories] == [7.0, 7.0]
        assert max(len(found.response_ids) for found in trajectories) <= most
    assert taught(name="tiny_demo").subject.config.data.max_prompt_length == 96
    with pytest.raises(UserError, match="expected a file of rows, got none; name one: --data"):
        evaluate.prepare("taught", Options(), ["data.val_files=[]"], None, "default", OUTPUTS)


def test_a_configuration_file_is_refused_for_a_run_that_has_its_own(project: Path):
    run = RunFolder(OUTPUTS / "my-run")
    run.path.mkdir(parents=True)
    run.write_config(configured([], None, "default"))
    (run.checkpoints / "global_step_3").mkdir(parents=True)

    for config, name in ((Path("trackway.yaml"), "default"), (None, "tiny_demo")):
        with pytest.raises(UserError, match="--config: expected none with run 'my-run', which has its own"):
            evaluate.prepare("my-run", Options(Path("rows.jsonl")), [], config, name, OUTPUTS)


def test_what_ended_before_a_stop_is_kept_and_not_rolled_out_again(project: Path):
    cut = prepared(n=2, name="cut")

    def stop(rollouts: list, left: int) -> None:
        if left == 2:
            raise KeyboardInterrupt

    with pytest.raises(BaseException):  # noqa: B017 - a KeyboardInterrupt, or the group that holds it
        evaluated(cut, stop)
    kept = {found.id for found in cut.store.trajectories()}
    again = list[str]()
    finished = evaluated(
        evaluate.resumed("cut", OUTPUTS), lambda rollouts, left: again.extend(one.id for one in rollouts)
    )

    assert finished.summary is not None and finished.summary.rollouts == 10
    assert len(kept) >= 6 and not kept & {*again}
    whole = evaluated(prepared(n=2, name="whole"))
    assert whole.summary is not None and whole.summary.score == finished.summary.score
    with pytest.raises(UserError, match="is finished"):
        evaluate.resumed("cut", OUTPUTS)


def test_a_rollout_lost_to_infrastructure_is_repeated_by_a_resumption(project: Path):
    store = EvaluationStore(OUTPUTS / "lost")
    store.begin(Evaluation(name="lost", model="m", files=[], rows=2, n=1), resolve({}))
    store.add([rollout(0, 0, None), rollout(1, 0, 1.0)])
    assert store.done() == {1}

    store.add([rollout(0, 0, 0.0)])
    finished = store.finish()

    assert finished.summary is not None and (finished.summary.rollouts, finished.summary.failed) == (2, 0)


def test_rescoring_asks_what_the_agent_asked_and_keeps_the_rollouts(project: Path):
    (project / "recording.py").write_text(RECORDING)
    evaluated(prepared("custom_reward_function.path=recording.py", n=2, name="first"))
    asked = sorted((project / "scored.jsonl").read_text().splitlines())
    (project / "scored.jsonl").unlink()

    same = evaluate.rescored("first", [], None, OUTPUTS, lambda name, state: None)
    (project / "other.py").write_text(OTHER_SCORE)
    override = f"custom_reward_function.path={project / 'other.py'}"
    other = evaluate.rescored("first", [override], "sevens", OUTPUTS, lambda name, state: None)

    (project / "broken.py").write_text(OTHER_SCORE.replace("return 7", "raise KeyError('k')"))
    with pytest.raises(TrackwayError, match="KeyError"):
        path = f"custom_reward_function.path={project / 'broken.py'}"
        evaluate.rescored("first", [path], "broken", OUTPUTS, lambda name, state: None)
    assert not (OUTPUTS / "broken").exists()

    assert len(asked) == 10
    assert sorted((project / "scored.jsonl").read_text().splitlines()) == asked
    assert same.name == "first-rescored"
    first, again, sevens = (EvaluationStore(OUTPUTS / name) for name in ("first", "first-rescored", "sevens"))
    assert again.trajectories() == first.trajectories()
    assert other.summary is not None and other.summary.score is not None and other.summary.score.value == 7.0
    assert [found.response_ids for found in sevens.trajectories()] == [
        found.response_ids for found in first.trajectories()
    ]


def test_mlflow_has_the_evaluation_as_a_run_with_the_traces_of_its_first_rows(project: Path, mlflow_server: str):
    words = [f"trackway.mlflow_uri={mlflow_server}", "trainer.project_name=evaluations"]
    run_name = "actor_rollout_ref.rollout.trace.experiment_name=of-the-run"

    finished = evaluated(prepared(*words, run_name, "trackway.trace_validation_samples=2", n=2, name="tracked"))

    assert finished.summary is not None
    info, client = RunFolder(OUTPUTS / "tracked").info(), MlflowClient(mlflow_server)
    stored = client.get_run(info.run_id or "")
    assert (stored.info.run_name, stored.info.status) == ("tracked", "FINISHED")
    assert stored.data.metrics["evaluation/pass_at_2"] == pytest.approx(finished.summary.pass_at[2].value)
    rollouts = EvaluationStore(OUTPUTS / "tracked").trajectories()
    rows = [found.tags.sample_index for found in rollouts]
    traced = {f"tr-{found.trace_id}": found for found in rollouts if found.trace_id}
    assert [found.tags.sample_index for found in traced.values()] == rows[:4] and len(rows) == 10
    traces = client.search_traces(locations=[info.experiment_id or ""], run_id=info.run_id)
    assert {trace.info.trace_id for trace in traces} == {*traced}
    for trace in traces:
        rollout = traced[trace.info.trace_id]
        assert rollout.reward is not None
        values = {found.name: found.to_dictionary() for found in trace.info.assessments}
        values = {name: (value.get("feedback") or value["expectation"])["value"] for name, value in values.items()}
        assert values == {"reward": rollout.reward.score, "ground_truth": rollout.ground_truth}
        tags = {"experiment_name": "tracked", "validate": "True", "rollout_n": str(rollout.tags.rollout_n)}
        assert {name: trace.info.tags.get(name) for name in tags} == tags
        assert [span.name for span in trace.data.spans if span.parent_id is None] == ["trajectory"]


def traced_rows(name: str, *overrides: str) -> int:
    evaluated(prepared(*overrides, name=name))
    return sum(found.trace_id is not None for found in EvaluationStore(OUTPUTS / name).trajectories())


def test_evaluations_trace_within_the_keys_of_training(
    project: Path, mlflow_server: str, capfd: pytest.CaptureFixture[str]
):
    uri = f"trackway.mlflow_uri={mlflow_server}"

    assert traced_rows("off", uri, "trackway.trace_validation_samples=0") == 0
    assert traced_rows("dummy", uri, "actor_rollout_ref.rollout.trace.backend=dummy") == 0
    assert traced_rows("unknown", uri, "trackway.trace_bytes_per_day=1") == 1  # the size of a trace is not known yet
    assert traced_rows("spent", uri, "trackway.trace_bytes_per_day=1") == 0
    assert traced_rows("more", uri, "trainer.log_val_generations=5") == 5
    capfd.readouterr()
    assert traced_rows("nowhere", "actor_rollout_ref.rollout.trace.backend=mlflow") == 0
    assert "MLFLOW_TRACKING_URI" not in capfd.readouterr().err


def test_a_full_disk_is_named_and_the_rest_is_rolled_out_once_there_is_room(
    project: Path, small_disk: Path, fill: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(f"{__name__}.OUTPUTS", small_disk)
    filler = fill(small_disk, leave=48 * 1024)

    with pytest.raises(StorageError, match=r"expected to write a rollout to .*, got 'No space left on device' with 0"):
        evaluated(prepared(n=16, name="full"))
    kept = [found.id for found in EvaluationStore(small_disk / "full").trajectories()]
    filler.unlink()
    evaluation = evaluated(evaluate.resumed("full", small_disk))

    assert evaluation.summary is not None
    assert (evaluation.summary.tasks, evaluation.summary.rollouts, evaluation.summary.failed) == (5, 80, 0)
    assert 0 < len(kept) < 80
    assert {*kept} < {found.id for found in EvaluationStore(small_disk / "full").trajectories()}


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        (
            "nothing",
            {},
            r"expected a run \(none\), a checkpoint, a model's folder or Hub id, a URL, or 'running', got 'nothing'",
        ),
        ("running", {}, "expected running services for outputs, got none; start them with `trackway up`"),
        (".", {"policy": "a:8"}, "--policy a:8: expected 'running' to evaluate, got '.'; leave it out"),
        (".", {"rows": None}, "expected a file of rows, got none; name one: --data rows.jsonl"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(project: Path, what: str, options: dict, message: str):
    with pytest.raises(UserError, match=message):
        evaluate.prepare(what, Options(**options), ["data.val_files=[]"], None, "default", OUTPUTS)


def test_an_evaluation_is_not_trained_further(project: Path):
    store = EvaluationStore(OUTPUTS / "eval-1")
    store.begin(Evaluation(name="eval-1", model="m", files=[], rows=1, n=1), resolve({}))

    with pytest.raises(UserError, match="expected a training run, got the evaluation 'eval-1', which trains nothing"):
        prepare(["trainer.total_training_steps=9"], None, "default", UpSettings.read(outputs=OUTPUTS), resume="eval-1")


def test_a_name_is_taken_once(project: Path):
    store = EvaluationStore(OUTPUTS / "taken")
    store.begin(Evaluation(name="taken", model="m", files=[], rows=1, n=1), resolve({}))

    with pytest.raises(TrackwayError, match="give another --run, or continue it with --resume taken"):
        store.begin(Evaluation(name="taken", model="m", files=[], rows=1, n=1), resolve({}))
    with pytest.raises(TrackwayError, match="expected an evaluation at"):
        EvaluationStore(OUTPUTS / "unknown").evaluation()


def test_the_command_prints_one_document_and_compares(project: Path):
    model = str(UpSettings.read().model_path)
    words = ["--data", "rows.jsonl", "--limit", "3", "--json"]

    first = trackway("evaluate", model, *words, "--run", "first", cwd=project)
    second = trackway("evaluate", model, *words, "--seed", "7", "--against", "first", cwd=project)
    shown = trackway("evaluate", "first", "--against", "eval-tiny", cwd=project)

    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    document = json.loads(second.stdout)
    assert document["evaluation"]["name"] == "eval-tiny"
    assert document["compared"]["score"]["tasks"] == 3
    assert shown.returncode == 0 and "in score against eval-tiny" in shown.stdout
    tokens = json.loads(first.stdout)["evaluation"]["summary"]["tokens"]
    assert re.search(rf"^tokens in all +{tokens:,} *$", shown.stdout, re.MULTILINE)
    assert f"each row: {project}/outputs/first/tasks.jsonl" in shown.stdout.replace("\n", "")


def test_ctrl_c_names_the_command_that_continues(project: Path):
    command = [
        sys.executable,
        "-m",
        "trackway.deploy.cli",
        "evaluate",
        str(UpSettings.read().model_path),
        "--run",
        "cut",
    ]
    process = subprocess.Popen(
        [*command, "--data", "rows.jsonl", "--n", "64"], cwd=project, stderr=subprocess.PIPE, text=True
    )
    lines = project / "outputs" / "cut" / "rollouts.jsonl"
    until(lambda: lines.is_file() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)

    assert process.returncode == 130, printed
    assert "continue with: trackway evaluate --resume cut" in " ".join(printed.split())


def trackway(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trackway.deploy.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)
