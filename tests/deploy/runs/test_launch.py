"""What the command line says about a run's traces, and refuses before a start."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.checks.run import check_start
from trackway.deploy.cli import app
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.losses import rollout_losses, trace_losses, tracking_losses
from trackway.deploy.runs.prepare import localised, placed, prepare
from trackway.run_config import compose
from trackway.system.process import UserError
from trackway.wire.trainer import BackendSummary, RunInfo, RunState, TraceSummary

TRACE = "actor_rollout_ref.rollout.trace"


def losses(summary: TraceSummary | None) -> list[str]:
    return trace_losses(RunInfo(run="r", state=RunState.FINISHED, traces=summary), Path("outputs"))


@pytest.mark.parametrize("summary", [None, TraceSummary(trajectories=9, bytes=9000)])
def test_nothing_is_said_when_every_span_arrived(summary: TraceSummary | None) -> None:
    assert losses(summary) == []


@pytest.mark.parametrize(
    ("dropped", "refused", "reasons"),
    [
        (12, 0, "12 spans lost: 12 dropped for lack of space"),
        (0, 3, "3 spans lost: 3 refused by a backend"),
        (12, 3, "15 spans lost: 12 dropped for lack of space, 3 refused by a backend"),
    ],
)
def test_lost_spans_are_counted_by_reason(dropped: int, refused: int, reasons: str) -> None:
    [said] = losses(TraceSummary(spans_dropped=dropped, spans_refused=refused))
    assert said == f"{reasons}; see the services' logs"


@pytest.mark.parametrize(("spool_bytes", "size"), [(3_140_000, "3.1 MB"), (100_000, "0.1 MB"), (999, "999 bytes")])
def test_what_waits_on_disk_is_said_with_its_place(spool_bytes: int, size: str) -> None:
    [said] = losses(TraceSummary(spans_waiting=400, spool_bytes=spool_bytes))
    assert said == (
        f"{size} of traces wait on disk in outputs/spool; running services send them once the backend is back"
    )


def test_what_was_on_its_way_and_who_did_not_answer_is_said() -> None:
    assert losses(TraceSummary(spans_waiting=4, unknown=["agent", "tools"])) == [
        "4 spans were still being sent when the run ended",
        "span counts are unavailable for: agent, tools",
    ]


def test_what_waits_for_a_backend_and_what_is_lost_there_is_said_with_its_reason() -> None:
    waiting = BackendSummary(backend="mlflow", rows_waiting=1, feedback_waiting=40, waits_for="it is slow")
    lost = BackendSummary(backend="wandb", metrics_lost=3, lost_because="no room")
    whole = BackendSummary(backend="tensorboard")
    info = RunInfo(run="r", state=RunState.FINISHED, tracking=[waiting, lost, whole])

    assert tracking_losses(info) == [
        "1 row of metrics and 40 values of feedback not yet in MLflow (it is slow): kept on disk and sent later",
        "3 values of metrics lost for W&B: no room",
    ]


def test_failed_rollouts_are_counted_with_the_page_that_has_their_errors() -> None:
    states = {"submitted": 192, "used": 170, "dropped_failed": 12, "dropped_infrastructure": 7, "dropped_filtered": 3}
    info = RunInfo(run="r", state=RunState.FINISHED, rollout_states=states)

    said = "19 of 192 failed and were not trained on"
    assert rollout_losses(info, None) == [said]
    assert rollout_losses(info, Path("o")) == [
        f"{said}; page Failures of `trackway console --outputs o` has their errors"
    ]
    assert rollout_losses(info.model_copy(update={"rollout_states": states | dict.fromkeys(states, 0)}), None) == []


def test_a_demo_for_a_backend_without_its_key_is_refused_before_it_starts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    words = [f"{TRACE}.backend=[mlflow,weave]", f"{TRACE}.project_name=me/p", "data.train_files=/rows.parquet"]
    demo = prepare(words, None, "tiny_demo", UpSettings(outputs=tmp_path))

    with pytest.raises(UserError, match="needs W&B's API key: set WANDB_API_KEY in the environment of this command"):
        check_start(demo)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    check_start(demo)


def test_damaged_checkpoints_are_skipped_only_by_a_run_that_is_resumed() -> None:
    told = CliRunner().invoke(app, ["train", "--skip-damaged"])

    assert isinstance(told.exception, UserError)
    assert str(told.exception) == "--skip-damaged: expected --resume with it, got none; give --resume RUN"


def test_every_path_of_this_machine_is_made_whole_and_names_of_other_places_stay(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("model").mkdir()
    turns = "actor_rollout_ref.rollout.multi_turn"
    words = ["data.train_files=[a.parquet,'~/b.parquet']", "data.val_files='s3://bucket/c.parquet'"]
    words += [f"{turns}.tool_config_path=tools.yaml", "trainer.resume_from_path=run/global_step_3"]

    here = localised(compose([*words, "actor_rollout_ref.model.path=model"]))
    hub = localised(compose(["actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct"]))

    assert here.data.train_files == [f"{tmp_path}/a.parquet", "/home/me/b.parquet"]
    assert here.data.val_files == ["s3://bucket/c.parquet"]
    assert here.actor_rollout_ref.rollout.multi_turn.tool_config_path == f"{tmp_path}/tools.yaml"
    assert here.trainer.resume_from_path == f"{tmp_path}/run/global_step_3"
    assert here.actor_rollout_ref.model.path == f"{tmp_path}/model"
    assert hub.actor_rollout_ref.model.path == "Qwen/Qwen2.5-3B-Instruct"


def test_a_run_without_a_model_trains_the_one_that_this_machine_serves(tmp_path: Path):
    served: dict[str, object] = {"applications": [{"name": "rollout", "args": {"model_path": "/models/served"}}]}
    here = Deployment(base_url="", dashboard_url="", mlflow_uri="", outputs=tmp_path, serve_config=served)
    attached = Deployment(base_url="", dashboard_url="", mlflow_uri="", outputs=tmp_path, attached=True)
    named = compose(["actor_rollout_ref.model.path=Some/Model"])

    assert placed(compose([]), here).actor_rollout_ref.model.path == "/models/served"
    assert placed(compose([]), None).actor_rollout_ref.model.path == str(TINY_MODEL)
    assert placed(compose([]), attached).actor_rollout_ref.model.path is None
    assert placed(named, here).actor_rollout_ref.model.path == "Some/Model"
