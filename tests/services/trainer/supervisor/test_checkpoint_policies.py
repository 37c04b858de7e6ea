"""Checkpoints that a rollout service serves by their names."""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.services.trainer.learner_settings import learner_config, logprobs_of
from tests.services.trainer.real_runs import on_disk
from trackway.clients.weights import WeightStore
from trackway.learner.learner import Learner
from trackway.rollout.app import create_app
from trackway.rollout.engines.weight_folder import is_adapter
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import resolve
from trackway.trainer.run_state.checkpoint import save_checkpoint
from trackway.trainer.supervisor.checkpoint_policies import CheckpointPolicies
from trackway.trainer.supervisor.registry import RunRegistry
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Trajectory

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

IDS = [5, 9, 2, 33, 7, 1, 60]


LORA = {"lora_rank": 4, "lora_alpha": 32.0, "target_modules": "all-linear"}


@pytest.fixture
def train(tiny_model: Path, tmp_path: Path, rollout: Callable[..., Trajectory]) -> Callable[..., Learner]:
    """Make the learner of a run after step 2, which has saved both steps."""

    def train(name: str, merge: bool = False, **lora: Any) -> Learner:
        folder = on_disk(tmp_path / "outputs", name)
        keys: dict[str, Any] = {f"actor_rollout_ref.model.{key}": value for key, value in lora.items()}
        keys |= {"actor_rollout_ref.model.path": str(tiny_model), "actor_rollout_ref.model.lora.merge": merge}
        (folder.path / "config.json").write_text(resolve(keys).model_dump_json())
        learner = Learner(learner_config(tiny_model, lr=1e-2, **lora))
        for step in (1, 2):
            learner.update([rollout(0, row, float(row), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(2)])
            save_checkpoint(folder.checkpoints, step, learner.save, {})
        return learner

    return train


@pytest.fixture
def learner(train: Callable[..., Learner]) -> Learner:
    """After step 2 of the run `demo`."""
    return train("demo")


@pytest.fixture
def policies(tmp_path: Path) -> CheckpointPolicies:
    return CheckpointPolicies(RunRegistry(tmp_path / "outputs"), str(tmp_path / "weights"))


async def served(model: Path, tmp_path: Path, policy: str) -> tuple[dict[int, float], dict[str, Any], httpx.Response]:
    """The logprobs of the next token under a policy on an embedded engine, its `/weights`, and the answer."""
    app = create_app(RolloutSettings(model_path=model, weights_url=str(tmp_path / "weights"), device="cpu"))
    greedy = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 20}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rollout") as client,
    ):
        body = {"model": policy, "token_ids": IDS[:-1], "sampling_params": greedy}
        answer = await client.post("/generate", json=body)
        if answer.is_error:
            return {}, {}, answer
        [entry] = answer.json()["choices"][0]["logprobs"]["content"]
        weights = (await client.get("/weights", params={"model": policy})).json()
    return {top["token_id"]: top["logprob"] for top in entry["top_logprobs"]}, weights, answer


def expected(learner: Learner, next_ids: Iterable[int]) -> dict[int, object]:
    return {token: pytest.approx(logprobs_of(learner, [*IDS[:-1], token])[-1], abs=1e-5) for token in next_ids}


async def test_a_checkpoint_is_served_with_the_weights_that_were_saved_until_it_is_dropped(
    policies: CheckpointPolicies, learner: Learner, tiny_model: Path, tmp_path: Path
) -> None:
    store = WeightStore(str(tmp_path / "weights"))
    loaded = await policies.load("demo:2")
    again = await policies.load("demo:2")
    logprobs, weights, _ = await served(tiny_model, tmp_path, "demo:2")
    listed = store.policies()
    await policies.drop("demo:2")
    assert (loaded.version, again.version) == (2, 2)
    assert (weights["version"], weights["verdict"]) == (2, "proven")
    assert logprobs == expected(learner, logprobs)
    assert (listed, store.policies()) == (["demo:2"], [])
    with pytest.raises(TrackwayError, match=r"expected a policy with weights \(none\), got 'demo:2'; name one"):
        await policies.drop("demo:2")


@pytest.mark.parametrize(("merge", "verdict"), [(False, "rounded"), (True, "proven")])
async def test_a_checkpoint_of_a_lora_run_is_published_as_the_run_published_it(
    merge: bool,
    verdict: str,
    policies: CheckpointPolicies,
    train: Callable[..., Learner],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    learner = train("lora", merge, **LORA)
    await policies.load("lora:2")
    logprobs, weights, _ = await served(tiny_model, tmp_path, "lora:2")
    assert is_adapter(tmp_path / "weights/policies/lora:2/2") is not merge
    assert (weights["version"], weights["verdict"]) == (2, verdict)
    assert logprobs == expected(learner, logprobs)
    assert logprobs != expected(Learner(learner_config(tiny_model)), logprobs)
    if not merge:
        _, _, answer = await served(another_base(tiny_model, tmp_path), tmp_path, "lora:2")
        assert answer.status_code == 503
        assert "expected an engine with weights version 2" in answer.json()["error"]["message"]


def another_base(model: Path, tmp_path: Path) -> Path:
    """Return the folder of a model of the same shape with other weights."""
    other = tmp_path / "other"
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in tensors.items()}, other / "model.safetensors")
    return other


async def test_a_run_that_began_again_under_its_name_replaces_the_policy(
    policies: CheckpointPolicies, learner: Learner, tmp_path: Path
) -> None:
    await policies.load("demo:1")
    folder = tmp_path / "outputs" / "demo"
    info = RunRegistry(tmp_path / "outputs").info("demo")
    (folder / "state.json").write_text(info.model_copy(update={"uid": "another-run"}).model_dump_json())
    assert (await policies.load("demo:1")).version == 2
    assert [latest.run for latest in [WeightStore(str(tmp_path / "weights/policies/demo:1")).latest()] if latest] == [
        "demo:1 (another-)"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demo", "expected a run and a step of its checkpoints, as demo:8, got 'demo'; add the step"),
        ("demo:7", "expected a checkpoint of step 7 of demo, got 1, 2; set trainer.save_freq, or give another --step"),
        ("other:1", "no run 'other'; the runs are: demo"),
    ],
)
async def test_what_is_no_checkpoint_is_refused(
    policies: CheckpointPolicies, learner: Learner, name: str, message: str
) -> None:
    with pytest.raises(TrackwayError) as caught:
        await policies.load(name)
    assert caught.value.message == message
