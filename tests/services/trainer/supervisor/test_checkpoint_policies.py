"""Checkpoints that a rollout service serves by their names."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from tests.services.trainer.real_runs import on_disk
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.trainer.config import resolve
from trackway.trainer.learner.learner import Learner
from trackway.trainer.run_state.checkpoint import save_checkpoint
from trackway.trainer.supervisor.checkpoint_policies import CheckpointPolicies
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

IDS = [5, 9, 2, 33, 7, 1, 60]


@pytest.fixture
def learner(tiny_model: Path, tmp_path: Path, rollout: Callable[..., Trajectory]) -> Learner:
    """After step 2 of the run `demo`, which has saved both."""
    folder = on_disk(tmp_path / "outputs", "demo")
    config = resolve({"actor_rollout_ref.model.path": str(tiny_model)})
    (folder.path / "config.json").write_text(config.model_dump_json())
    learner = Learner(learner_config(tiny_model, lr=1e-2))
    for step in (1, 2):
        learner.update([rollout(0, row, float(row), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(2)])
        save_checkpoint(folder.checkpoints, step, learner.save, {})
    return learner


@pytest.fixture
def policies(tmp_path: Path, learner: Learner) -> CheckpointPolicies:
    return CheckpointPolicies(RunRegistry(tmp_path / "outputs"), str(tmp_path / "weights"))


async def test_a_checkpoint_is_served_with_the_weights_that_were_saved(
    policies: CheckpointPolicies, learner: Learner, tiny_model: Path, tmp_path: Path
) -> None:
    loaded = await policies.load("demo:2")
    again = await policies.load("demo:2")
    app = create_app(RolloutSettings(model_path=tiny_model, weights_url=str(tmp_path / "weights"), device="cpu"))
    greedy = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 20}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rollout") as client,
    ):
        body = {"model": "demo:2", "token_ids": IDS[:-1], "sampling_params": greedy}
        [choice] = (await client.post("/generate", json=body)).json()["choices"]
        weights = (await client.get("/weights", params={"model": "demo:2"})).json()
    [entry] = choice["logprobs"]["content"]
    next_ids = [[*IDS[:-1], top["token_id"]] for top in entry["top_logprobs"]]
    assert (loaded.version, again.version) == (2, 2)
    assert (weights["version"], weights["verdict"]) == (2, "proven")
    assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(
        [logprobs_of(learner, ids)[-1] for ids in next_ids], abs=1e-5
    )


async def test_a_run_that_began_again_under_its_name_replaces_the_policy(
    policies: CheckpointPolicies, tmp_path: Path
) -> None:
    await policies.load("demo:1")
    folder = tmp_path / "outputs" / "demo"
    info = RunRegistry(tmp_path / "outputs").info("demo")
    (folder / "state.json").write_text(info.model_copy(update={"uid": "another-run"}).model_dump_json())
    assert (await policies.load("demo:1")).version == 2
    assert [latest.run for latest in [WeightStore(str(tmp_path / "weights/policies/demo:1")).latest()] if latest] == [
        "demo:1 (another-)"
    ]


async def test_a_dropped_policy_is_gone(policies: CheckpointPolicies, tmp_path: Path) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    await policies.load("demo:1")
    assert store.policies() == ["demo:1"]
    await policies.drop("demo:1")
    assert store.policies() == []
    with pytest.raises(TrackwayError, match=r"expected a policy with weights \(none\), got 'demo:1'; name one"):
        await policies.drop("demo:1")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo", "expected a run and a step of its checkpoints, as demo:8, got 'demo'; add the step"),
        ("demo:7", "expected a checkpoint of step 7 of demo, got 1, 2; set trainer.save_freq, or give another --step"),
        ("other:1", "no run 'other'; the runs are: demo"),
    ],
)
async def test_what_is_no_checkpoint_is_refused(policies: CheckpointPolicies, name: str, message: str) -> None:
    with pytest.raises(TrackwayError) as caught:
        await policies.load(name)
    assert caught.value.message == message
