"""Runs of supervised training, built from their folder: what they train, validate, save and go on with."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.services.trainer.sft_rows import write_conversations
from trackway.deploy.bundled import TINY_MODEL
from trackway.run_config import compose
from trackway.trainer.loop.build import build_supervised
from trackway.trainer.loop.fit import fit
from trackway.trainer.loop.supervised import SupervisedTraining
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NOWHERE = ServiceUrls(agent_url="http://127.0.0.1:9", tools_url="http://127.0.0.1:9", weights_url="unused")
NewRun = Callable[..., Awaitable[SupervisedTraining]]


@pytest.fixture
def new_run(tmp_path: Path):
    """Makes a run of 4 steps an epoch of 8 rows each; called with its name and overrides."""
    train = write_conversations(tmp_path / "train.jsonl", 34)
    held_out = write_conversations(tmp_path / "val.jsonl", 12, "test")

    async def make(name: str, *overrides: str) -> SupervisedTraining:
        lines = [f"model.path={TINY_MODEL}", f"data.train_files={train}", f"data.val_files={held_out}"]
        lines += ["data.train_batch_size=8", "optim.lr=1e-3", "trainer.total_epochs=2", "trainer.logger=[]"]
        folder = RunFolder(tmp_path / "outputs" / name)
        if not folder.exists:
            folder.create(compose([*lines, *overrides], config_name="sft"), NOWHERE)
        training, tracking = await build_supervised(folder, asyncio.Event())
        await asyncio.to_thread(tracking.close, "FINISHED", 1.0)
        return training

    return make


def column(run: SupervisedTraining, name: str) -> dict[int, float]:
    return {row.step: row.data[name] for row in run.folder.rows() if name in row.data}


def saved(run: SupervisedTraining) -> list[str]:
    return sorted(path.name for path in run.folder.checkpoints.glob("global_step_*"))


def weights(run: SupervisedTraining) -> bytes:
    return (run.folder.checkpoints / f"global_step_{run.step}/actor/model.safetensors").read_bytes()


async def test_a_run_needs_no_service_and_writes_verls_metrics(new_run: NewRun):
    run = await new_run("run", "trainer.test_freq=after_each_epoch", "trainer.save_freq=after_each_epoch")

    assert await fit(run) is RunState.FINISHED

    assert (run.plan.total_steps, saved(run)) == (8, ["global_step_4", "global_step_8"])
    assert list(column(run, "val/loss")) == [4, 8]
    losses = column(run, "train/loss")
    assert list(losses) == [1, 2, 3, 4, 5, 6, 7, 8] and losses[8] < losses[1]
    assert [*column(run, "training/epoch").values()] == [0.0] * 4 + [1.0] * 4
    written = run.folder.rows()[-1].data
    assert {"train/grad_norm", "train/lr", "train/global_tokens", "perf/throughput", "timing_s/step"} <= written.keys()


async def test_a_run_that_resumes_ends_in_the_same_bytes(new_run: NewRun):
    whole = await new_run("whole", "trainer.save_freq=1", "trainer.test_freq=2")
    await fit(whole)
    first = await new_run("cut", "trainer.save_freq=1", "trainer.test_freq=2")
    supervise = first.learner.supervise

    def stops_in_step_3(rows):
        if first.step == 2:
            first.stop.set()
        return supervise(rows)

    first.learner.supervise = stops_in_step_3

    assert (await fit(first), first.step) == (RunState.STOPPED, 3)
    second = await new_run("cut")
    assert (await fit(second), second.step) == (RunState.FINISHED, 8)

    assert weights(second) == weights(whole)
    assert column(second, "val/loss") == column(whole, "val/loss")
    assert column(second, "train/loss") == column(whole, "train/loss")


async def test_a_validation_that_a_stop_cut_off_is_done_when_the_run_goes_on(new_run: NewRun):
    first = await new_run("run", "trainer.test_freq=2")
    loss = first.learner.supervised_loss

    def stops_after_the_first_batch(rows):
        first.stop.set()
        return loss(rows)

    first.learner.supervised_loss = stops_after_the_first_batch
    assert (await fit(first), first.step) == (RunState.STOPPED, 2)
    assert column(first, "val/loss") == {}

    second = await new_run("run")
    assert await fit(second) is RunState.FINISHED

    assert list(column(second, "val/loss")) == [2, 4, 6, 8]
    assert list(column(second, "train/loss")) == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_the_validation_loss_is_the_mean_over_all_tokens_whatever_the_batches(new_run: NewRun):
    run = await new_run("run", "trainer.val_before_train=true")
    rows = [(list(row.ids), list(row.mask)) for row in run.held_out]

    metrics = await run.validate({})

    assert metrics == {"val/loss": pytest.approx(run.learner.supervised_loss(rows)[0])}
    assert len(rows) == 12 and run.batch_size == 8


async def test_a_run_begins_at_another_runs_checkpoint(new_run: NewRun):
    first = await new_run("first", "trainer.save_freq=1", "trainer.total_training_steps=3")
    await fit(first)

    path = first.folder.checkpoints / "global_step_2"
    again = await new_run(
        "again", "trainer.total_training_steps=3", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"
    )
    await fit(again)

    assert list(column(again, "train/loss")) == [3] and weights(again) == weights(first)


async def test_too_few_rows_for_a_batch_are_refused_before_the_model_is_loaded(new_run: NewRun):
    with pytest.raises(TrackwayError, match=r"expected at least data\.train_batch_size=64 rows, got 34; lower it"):
        await new_run("run", "data.train_batch_size=64")
