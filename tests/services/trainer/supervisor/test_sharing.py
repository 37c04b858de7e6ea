"""A run that the rollout service cannot hold is refused before it starts, with the setting to change."""

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.idle_engine import IdleEngine
from tests.services.trainer.real_runs import run_request, urls
from tests.serving import served_in_thread
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import compose
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.supervisor.manager import RunManager
from trackway.trainer.supervisor.sharing import ask_engines, check_place, check_weights
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("shared_http")]

SERVER: Mapping[str, Any] = {"engine": "vllm", "engine_url": "http://127.0.0.1:9"}
SHARED: Mapping[str, Any] = {**SERVER, "engine_shared": True, "max_lora_rank": 8}
RANK = "actor_rollout_ref.model.lora_rank"
NO_PLACE = "expected a rollout service with a place for one more policy beside first, got "
WAIT = "or wait until a run ends"
FIRST = RunInfo(run="first", state=RunState.RUNNING)


@pytest.fixture
def limits(tiny_model: Path) -> Callable[..., Any]:
    """Return the limits that a rollout service with these settings reports."""

    async def asked(**settings: Any) -> Any:
        app = create_app(RolloutSettings.model_validate({"model_path": tiny_model, **settings}), IdleEngine())
        with served_in_thread(app) as url:
            engines = await ask_engines(url)
        assert engines.limits is not None and engines.default_policy == "policy"
        return engines.limits

    return asked


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"max_policies": 1}, ErrorCode.CONFLICT, f"max_policies=1; raise max_policies, {WAIT}"),
        (
            SERVER,
            ErrorCode.CONFLICT,
            "engine=vllm without engine_shared; set engine_shared=true and max_lora_rank, for runs that publish "
            f"adapters, {WAIT}",
        ),
        ({**SHARED, "max_loras": 1}, ErrorCode.CONFLICT, f"max_loras=1; raise max_loras, also of the server, {WAIT}"),
    ],
)
async def test_a_service_without_a_place_for_a_second_policy_is_named_with_its_bound(
    limits, settings: Mapping[str, Any], code: ErrorCode, said: str
) -> None:
    with pytest.raises(TrackwayError) as caught:
        check_place(await limits(**settings), "second", [FIRST])

    assert (caught.value.code, caught.value.message) == (code, NO_PLACE + said)


async def test_the_places_of_runs_that_train_are_counted_with_the_default_one(limits) -> None:
    own = [FIRST.model_copy(update={"run": name, "policy": name}) for name in ("second", "third")]
    two, adapters = await limits(max_policies=2), await limits(**SHARED, max_loras=2)

    check_place(two, None, own[:1])
    check_place(two, "second", [FIRST])
    check_place(adapters, "second", [FIRST])
    for held, others in ((two, [FIRST, own[0]]), (two, own[:1]), (adapters, [FIRST, own[0]])):
        with pytest.raises(TrackwayError, match="expected a rollout service with a place for one more policy beside "):
            check_place(held, "third", others)
    with pytest.raises(TrackwayError) as alone:
        check_place(await limits(max_policies=1), "session", [])
    assert (alone.value.code, alone.value.message) == (
        ErrorCode.INVALID_REQUEST,
        "expected a rollout service for several policies, got max_policies=1; raise max_policies",
    )


@pytest.mark.parametrize(
    ("settings", "overrides", "said"),
    [
        (
            SHARED,
            [],
            f"{RANK}: expected an adapter for a server that policies share (engine_shared), got whole weights; set "
            "lora_rank and lora.merge=false, or give the run a server of its own",
        ),
        (
            {**SERVER, "max_lora_rank": 8},
            [f"{RANK}=16"],
            f"{RANK}: expected at most 8, the rollout service's max_lora_rank, got 16; lower it, or raise "
            "max_lora_rank there",
        ),
        (
            {},
            ["actor_rollout_ref.model.path={other}"],
            "actor_rollout_ref.model.path: expected the architecture of the rollout service's model, got "
            "num_hidden_layers 1 instead of 2 in {other}; train that model, or start services with this one",
        ),
    ],
)
async def test_weights_that_the_service_cannot_load_are_refused(
    limits, tiny_model: Path, tmp_path: Path, settings: Mapping[str, Any], overrides: list[str], said: str
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    words = [f"actor_rollout_ref.model.path={tiny_model}", *(word.format(other=other) for word in overrides)]

    with pytest.raises(TrackwayError) as caught:
        check_weights(compose(words), await limits(**settings))

    assert (caught.value.code, caught.value.message) == (ErrorCode.INVALID_REQUEST, said.format(other=other))


@pytest.mark.parametrize(
    ("settings", "overrides"),
    [
        (SHARED, [f"{RANK}=8"]),
        ({}, [f"{RANK}=64"]),
        ({**SERVER, "max_lora_rank": 8}, [f"{RANK}=16", "actor_rollout_ref.model.lora.merge=true"]),
        (SERVER, ["actor_rollout_ref.model.path=no/such-model"]),
    ],
)
async def test_weights_that_the_service_can_load_are_not(
    limits, tiny_model: Path, settings: Mapping[str, Any], overrides: list[str]
) -> None:
    check_weights(compose([f"actor_rollout_ref.model.path={tiny_model}", *overrides]), await limits(**settings))


@pytest.fixture
async def runs(tiny_model: Path, tmp_path: Path) -> AsyncIterator[RunManager]:
    """A trainer beside a rollout service for one policy."""
    app = create_app(RolloutSettings(model_path=tiny_model, max_policies=1), IdleEngine())
    with served_in_thread(app) as url:
        services = urls("http://127.0.0.1:9", tmp_path).model_copy(update={"rollout_url": url})
        runs = RunManager(tmp_path / "outputs", services, stop_deadline_s=0, max_runs=2)
        yield runs
        await runs.close()


async def test_the_trainer_starts_nothing_that_is_refused(
    runs: RunManager, tiny_model: Path, sample, tmp_path: Path
) -> None:
    other = shutil.copytree(tiny_model, tmp_path / "other")
    (other / "config.json").write_text((other / "config.json").read_text().replace('"qwen3"', '"llama"'))

    with pytest.raises(TrackwayError, match="got model_type llama instead of qwen3 in "):
        await runs.start(run_request(other, tmp_path, sample, "other"))
    with pytest.raises(TrackwayError, match="got max_policies=1; raise max_policies"):
        await runs.start_session("session", {"actor_rollout_ref.model.path": str(tiny_model)})
    held = RunFolder(tmp_path / "outputs" / "first")
    held.create(compose([]), runs.services)
    held.write_owner(Owner.of(os.getpid()))
    with pytest.raises(TrackwayError, match=r"beside first, got max_policies=1; raise max_policies, or wait"):
        await runs.start(run_request(tiny_model, tmp_path, sample, "second"))

    assert [info.run for info in runs.registry.list()] == ["first"]
