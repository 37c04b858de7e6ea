"""Runs of supervised training as processes: without any service, and after the death of their process."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.trainer.real_runs import ended, pid_of, urls
from tests.services.trainer.sft_rows import write_conversations
from tests.waiting import async_until
from trackway.deploy.bundled import TINY_MODEL
from trackway.run_config import compose
from trackway.trainer.supervisor.manager import RunManager
from trackway.wire.trainer import RunInfo, RunRequest, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]

STEPS = 8


@pytest.fixture
async def runs(tmp_path: Path) -> AsyncIterator[RunManager]:
    """Manages runs whose services do not exist."""
    runs = RunManager(tmp_path / "outputs", urls("http://127.0.0.1:9", tmp_path), stop_deadline_s=60)
    yield runs
    await runs.close()


def request(folder: Path, name: str, *overrides: str) -> RunRequest:
    rows = write_conversations(folder / "rows.jsonl", 40)
    lines = [f"model.path={TINY_MODEL}", f"data.train_files={rows}", f"data.val_files={rows}"]
    lines += ["data.train_batch_size=16", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1"]
    return RunRequest(config=compose([*lines, *overrides], config_name="sft").model_dump(mode="json"), run=name)


def weights(info: RunInfo) -> bytes:
    return (Path(info.folder) / f"checkpoints/global_step_{info.step}/actor/model.safetensors").read_bytes()


async def test_a_killed_process_is_started_again_and_ends_in_the_same_bytes(runs: RunManager, tmp_path: Path):
    await runs.start(request(tmp_path, "whole"))
    whole = await ended(runs, "whole")
    await runs.start(request(tmp_path, "killed"))
    await async_until(lambda: runs.registry.info("killed").step >= 2)

    os.kill(pid_of(runs, "killed"), signal.SIGKILL)
    killed = await ended(runs, "killed")

    assert (whole.state, whole.step, whole.restarts) == (RunState.FINISHED, STEPS, 0)
    assert (killed.state, killed.step, killed.restarts) == (RunState.FINISHED, STEPS, 1)
    assert weights(killed) == weights(whole)
    assert killed.metrics["val/loss"] == whole.metrics["val/loss"] < 1.0
    assert killed.rollout_states == {}


async def test_a_row_that_cannot_be_trained_fails_the_run_by_name(runs: RunManager, tmp_path: Path):
    asked = request(tmp_path, "bad", "data.messages_key=talk")
    await runs.start(asked)
    info = await ended(runs, "bad")

    assert info.state is RunState.FAILED
    assert f"{tmp_path}/rows.jsonl:1: expected the column talk (data.messages_key), got messages, tools" in info.message
