"""The promise: a model is taught from given answers as a run like any other, and rewards then train what came out."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.services.trainer.sft_rows import write_conversations
from tests.waiting import until
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.trainer.run_state.export import export_checkpoint
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_a_model_is_taught_from_answers_then_trained_by_rewards(
    deployment: Deployment, started, tmp_path: Path
) -> None:
    session = RunSession(deployment)
    train = write_conversations(tmp_path / "train.jsonl", 32)
    held_out = write_conversations(tmp_path / "val.jsonl", 8, "test")
    keys = [f"model.path={TINY_MODEL}", f"data.train_files={train}", f"data.val_files={held_out}"]
    keys += ["data.train_batch_size=16", "trainer.total_epochs=1", "trainer.test_freq=1"]
    taught = session.follow(session.start(compose(keys, config_name="sft"), "taught").run, lambda info: None)

    assert (taught.state, taught.step) == (RunState.FINISHED, 2)
    client, run_id = MlflowClient(tracking_uri=deployment.mlflow_uri), str(taught.run_id)
    until(lambda: len(client.get_metric_history(run_id, "val/loss")) == 2)
    written = [row.data["val/loss"] for row in RunFolder(Path(taught.folder)).rows()]
    assert [metric.value for metric in client.get_metric_history(run_id, "val/loss")] == pytest.approx(written)

    export_checkpoint(RunFolder(Path(taught.folder)), tmp_path / "model")
    rewarded = session.follow(
        started("rewarded", 1, f"actor_rollout_ref.model.path={tmp_path}/model").run, lambda info: None
    )
    assert (rewarded.state, rewarded.step) == (RunState.FINISHED, 1)
