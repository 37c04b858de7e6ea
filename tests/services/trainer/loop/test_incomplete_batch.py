"""A run that trains on the incomplete batch of each epoch, whole and resumed, over a real socket."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.waiting import async_until
from trackway.run_config import compose
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.loop.build import build
from trackway.trainer.loop.fit import fit
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import GroupRequest, Sample
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("shared_http")]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, sample: Callable[[int], Sample], agent_url: str) -> RunFolder:
    """A run of 5 rows in batches of 2, for 2 epochs: 6 steps."""
    write_rows(tmp_path / "train.parquet", [sample(index) for index in range(5)])
    overrides = [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={tmp_path}/train.parquet",
        "data.train_batch_size=2",
        "data.drop_last=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_epochs=2",
    ]
    urls = ServiceUrls(agent_url=agent_url, tools_url="http://127.0.0.1:9", weights_url=str(tmp_path / "weights"))
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.create(compose(overrides), urls)
    return folder


async def train(folder: RunFolder, stop: asyncio.Event) -> RunState:
    training, tracking = await build(folder, stop)
    try:
        return await fit(training)
    finally:
        training.publisher.close()
        tracking.close("FINISHED", 10.0)
        await training.traces.close(10.0)


def rows_by_step(requests: list[GroupRequest]) -> list[set[int | str]]:
    """The rows of each step, in the order of the steps; a step that was asked again has the same ones."""
    steps: defaultdict[int, set[int | str]] = defaultdict(set)
    for request in requests:
        steps[request.step].add(request.sample.index)
    return [steps[step] for step in sorted(steps)]


async def test_every_row_is_trained_on_in_every_epoch(folder: RunFolder, agent) -> None:
    state = await train(folder, asyncio.Event())

    steps = rows_by_step(agent.requests)
    assert (state, folder.info().step, folder.info().total_steps) == (RunState.FINISHED, 6, 6)
    assert [len(rows) for rows in steps] == [2, 2, 1, 2, 2, 1]
    assert [set.union(*steps[:3]), set.union(*steps[3:])] == [{0, 1, 2, 3, 4}] * 2
    assert [row.data["training/epoch"] for row in folder.rows()] == [0, 0, 0, 1, 1, 1]
    assert [row.data["training/trajectories"] for row in folder.rows()] == [4, 4, 2, 4, 4, 2]


async def test_a_run_stopped_before_the_incomplete_batch_goes_on_with_it(folder: RunFolder, agent) -> None:
    stop = asyncio.Event()
    agent.holding_at = 3
    stopping = asyncio.create_task(train(folder, stop))
    await async_until(lambda: any(request.step == 3 for request in agent.requests))
    stop.set()
    first = await stopping
    agent.released.set()
    begun = rows_by_step(agent.requests)

    second = await train(folder, asyncio.Event())

    steps = rows_by_step(agent.requests)
    assert (first, second) == (RunState.STOPPED, RunState.FINISHED)
    assert steps[:3] == begun
    assert [len(rows) for rows in steps] == [2, 2, 1, 2, 2, 1]
    assert [set.union(*steps[:3]), set.union(*steps[3:])] == [{0, 1, 2, 3, 4}] * 2
