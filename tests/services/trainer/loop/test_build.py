"""What a run waits for before its first step, and at a publication: each part has a name while it lasts."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trackway.clients.weights import WeightStore
from trackway.system.waits import Waits
from trackway.trainer.config import compose
from trackway.trainer.data.parquet import write_rows
from trackway.trainer.loop import build as module
from trackway.trainer.loop.build import build
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import Sample

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_http")]


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path, sample: Callable[[int], Sample], agent_url: str) -> RunFolder:
    write_rows(tmp_path / "train.parquet", [sample(index) for index in range(2)])
    keys = [
        f"actor_rollout_ref.model.path={tiny_model}",
        f"data.train_files={tmp_path}/train.parquet",
        *("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    ]
    urls = ServiceUrls(agent_url=agent_url, tools_url="http://127.0.0.1:9", weights_url=str(tmp_path / "weights"))
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.create(compose(keys), urls)
    return folder


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> tuple[Waits, dict[str, list[str]]]:
    """The run's waits, and those in progress when each part of `build` began."""
    waits, seen = Waits(), dict[str, list[str]]()

    def noting(name: str) -> None:
        part = getattr(module, name)

        def noted(*given: Any, **named: Any) -> Any:
            seen[name] = [wait.waits_for for wait in waits.current()]
            return part(*given, **named)

        monkeypatch.setattr(module, name, noted)

    for name in ("load_data", "check_names", "open_engines", "open_tracking", "_learner", "begin", "Publisher"):
        noting(name)
    return waits, seen


async def test_each_part_before_the_first_step_is_named(folder: RunFolder, named) -> None:
    waits, seen = named
    training, tracking = await build(folder, asyncio.Event(), False, waits)
    training.publisher.close()
    tracking.close("FINISHED", 10.0)

    assert seen == {
        "load_data": ["its rows to be read"],
        "check_names": ["the services to say which agent loops, tools and scorers they have"],
        "open_engines": ["the rollout service to say whether its engines can sleep"],
        "open_tracking": ["MLflow's id of the run, and the other loggers"],
        "_learner": ["its model to be loaded"],
        "begin": ["its checkpoint to be loaded"],
        "Publisher": [f"the lock of the weight store {folder.services().weights_url}"],
    }
    assert training.waits is waits and waits.current() == []


async def test_a_publication_says_where_it_is(folder: RunFolder, named, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, _ = named
    training, tracking = await build(folder, asyncio.Event(), False, waits)
    publish, during = WeightStore.publish, list[tuple[str, str]]()

    def slow(*given: Any) -> Any:
        during.extend((wait.waits_for, wait.progress) for wait in waits.current())
        return publish(*given)

    monkeypatch.setattr(WeightStore, "publish", slow)
    await training.publish()
    training.publisher.close()
    tracking.close("FINISHED", 10.0)

    store = folder.services().weights_url
    assert during == [("the publication of the weights after step 0", f"copies version 1 to the weight store {store}")]
