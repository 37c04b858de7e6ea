"""What a run is built of, and what it waits for before its first step and at a publication."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trackway.clients import AgentClient
from trackway.clients.weights import WeightStore
from trackway.run_config import compose, resolve
from trackway.run_config.compose import leaves
from trackway.system.waits import Waits
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.loop import build as module
from trackway.trainer.loop.base import Profiler
from trackway.trainer.loop.build import build
from trackway.trainer.loop.rollout_client import GroupTemplate, RetryPolicy, Rollouts, sampled_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.agent import Sample
from trackway.wire.trajectory import Reward, Trajectory

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


async def test_remax_asks_for_a_greedy_rollout_with_each_group_of_the_training(
    folder: RunFolder, tmp_path: Path, agent
) -> None:
    tree = folder.config().model_dump(mode="json")
    run = RunFolder(tmp_path / "outputs" / "other")
    run.create(resolve(leaves(tree) | {"algorithm.adv_estimator": "remax"}), folder.services())
    training, tracking = await build(run, asyncio.Event(), False, Waits())
    version = await training.publish()
    trajectories = await training.rollout(version)
    metrics = await training.update(trajectories, version)
    training.publisher.close()
    tracking.close("FINISHED", 10.0)

    requests = [request for request in agent.requests if not request.validation]
    greedy = [request for request in requests if request.sampling_params.temperature == 0.0]
    assert len(requests) == 2 * len(greedy) > 0
    assert all("reward_baseline" in t.reward.components for t in sampled_of(trajectories) if t.reward)
    dumped = read_trajectories(run.path / "trajectories" / "step_1.parquet")
    assert [t.is_baseline for t in dumped].count(True) == len(greedy)
    account = training.scheduler.account()
    assert account["submitted"] == sum(count for state, count in account.items() if state != "submitted")
    assert (account["baseline"], account["used"]) == (len(greedy), len(trajectories) - len(greedy))
    assert metrics["rollouts/baseline"] == len(greedy)
    assert metrics["training/trajectories"] == account["used"]


async def test_validations_have_rows_sampling_and_limits_of_their_own(
    folder: RunFolder, tmp_path: Path, sample: Callable[[int], Sample], agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight = dict[bool, int]()

    def noted(client: AgentClient, template: GroupTemplate, policy: RetryPolicy, *more: Any) -> Rollouts:
        in_flight[template.validation] = policy.max_inflight
        return Rollouts(client, template, policy, *more)

    monkeypatch.setattr(module, "Rollouts", noted)
    write_rows(tmp_path / "test.parquet", [sample(7)])
    rollout = "actor_rollout_ref.rollout"
    keys = {
        "data.val_files": [str(tmp_path / "test.parquet")],
        **{f"{rollout}.n": 2, f"{rollout}.temperature": 0.7, f"{rollout}.top_k": 11},
        **{f"{rollout}.val_kwargs.{name}": value for name, value in (("n", 3), ("temperature", 0.6), ("top_k", 13))},
        **{f"{rollout}.val_kwargs.do_sample": True, "data.max_response_length": 98},
        **{"data.val_batch_size": 7, "trackway.max_inflight_groups": 22},
    }
    tree = folder.config().model_dump(mode="json")
    run = RunFolder(tmp_path / "outputs" / "other")
    run.create(resolve(leaves(tree) | keys), folder.services())
    training, tracking = await build(run, asyncio.Event(), False, Waits())
    version = await training.publish()
    await training.validate(version)
    await training.rollout(version)
    training.publisher.close()
    tracking.close("FINISHED", 10.0)

    asked = {
        (request.validation, request.sample.index, request.n, params.temperature, params.top_k, params.max_tokens)
        for request, params in ((request, request.sampling_params) for request in agent.requests)
    }
    assert asked == {(True, 7, 3, 0.6, 13, 98), (False, 0, 2, 0.7, 11, 98), (False, 1, 2, 0.7, 11, 98)}
    assert {request.limits.max_response_length for request in agent.requests} == {98}
    assert in_flight == {False: 22, True: 7}


async def test_the_filter_the_penalty_the_samples_and_the_profiler_are_built_from_their_keys(
    folder: RunFolder, tmp_path: Path, agent
) -> None:
    def right_in_row_0(trajectory: Trajectory) -> Trajectory:
        return trajectory if trajectory.tags.sample_index else trajectory.model_copy(update={"reward": Reward(score=1)})

    agent.change = right_in_row_0
    keys = {
        "algorithm.filter_groups.enable": True,
        "actor_rollout_ref.rollout.n": 2,
        **{"data.train_batch_size": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 1},
        "data.shuffle": False,
        "reward.reward_kwargs": {"max_resp_len": 8, "overlong_buffer_cfg": {"enable": True, "len": 8}},
        "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
        "trainer.rollout_data_dir": str(tmp_path / "samples"),
        "trainer.validation_data_dir": str(tmp_path / "validations"),
        "global_profiler": {"tool": "torch", "steps": [1]},
    }
    tree = folder.config().model_dump(mode="json")
    run = RunFolder(tmp_path / "outputs" / "other")
    run.create(resolve(leaves(tree) | leaves(keys)), folder.services())
    training, tracking = await build(run, asyncio.Event(), False, Waits())
    trajectories = await training.rollout(await training.publish())
    training.publisher.close()
    tracking.close("FINISHED", 10.0)

    scores = [(found.tags.sample_index, found.reward.score) for found in trajectories if found.reward]
    assert scores == [(1, -0.5), (1, 0.5)]
    line = json.loads((tmp_path / "samples" / "1.jsonl").read_text().splitlines()[1])
    assert (line["score"], line["gts"], line["step"]) == (0.5, "1", 1)
    assert isinstance(line["input"], str)
    assert training.validation.samples is not None
    assert training.validation.samples.folder == tmp_path / "validations"
    assert training.profiler == Profiler(run.path / "profile", frozenset({1}))
