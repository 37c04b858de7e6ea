"""Whoever trains steers a replica: pause, abort, sleep, wake up; and a stuck engine says that it is broken."""

import asyncio
import threading
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from benchmarks.sim_engine import SIM, SimEngine
from fastapi import FastAPI

from tests.time_limits import ENDS_SOON
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.engines.torch import engine as torch_engine
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings

pytestmark = pytest.mark.anyio

ENDLESS = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 900, "ignore_eos": True}}


class Running(Protocol):
    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def settings(model_path: Path) -> RolloutSettings:
    return RolloutSettings(model_path=model_path, model_name="tiny", device="cpu", stuck_s=0.1)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def test_an_engine_that_gets_nothing_done_is_broken_until_it_does(
    running: Running, settings: RolloutSettings
) -> None:
    engine, held = TorchEngine(settings), threading.Event()
    async with running(create_app(settings, engine)) as client:
        assert (await client.get("/ready")).json() == {"ready": True, "reason": "", "broken": False}
        engine._thread.post(lambda: held.wait(30))
        await async_until(lambda: engine.stuck_for() > 0.1)
        stuck = await client.get("/ready")
        held.set()
        await async_until(lambda: engine.stuck_for() == 0.0)
        assert (await client.get("/ready")).status_code == 200
    assert (stuck.status_code, stuck.json()["broken"]) == (503, True)
    assert stuck.json()["reason"].startswith("the engine has made no progress on its work for ")


async def test_aborted_generations_answer_with_what_they_have(running: Running, settings: RolloutSettings) -> None:
    engine = TorchEngine(settings)
    async with running(create_app(settings, engine)) as client:
        calls = [
            asyncio.create_task(client.post("/generate", json={**ENDLESS, "request_id": name})) for name in ("a", "b")
        ]
        await async_until(lambda: engine.stats().running == 2)
        assert (await client.post("/abort_requests", json={"request_ids": ["a", "c"]})).json()["aborted"] == 1
        assert (await client.post("/inference/v1/abort_requests")).json() == {"status": "aborted", "aborted": 1}
        answers = [(await call).json()["choices"][0] for call in calls]
    assert [(answer["finish_reason"], len(answer["token_ids"]) < 900) for answer in answers] == [("abort", True)] * 2


async def test_pausing_by_vllms_query_cuts_for_good(running: Running, settings: RolloutSettings) -> None:
    engine = TorchEngine(settings)
    async with running(create_app(settings, engine)) as client:
        call = asyncio.create_task(client.post("/generate", json=ENDLESS))
        await async_until(lambda: engine.stats().running == 1)
        assert (await client.post("/pause?mode=abort")).json() == {"paused": True, "running": 0, "waiting": 0}
        assert (await call).json()["choices"][0]["finish_reason"] == "abort"
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        await client.post("/resume")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}


async def test_an_operator_does_not_wait_for_weights_that_are_being_read(
    running: Running,
    settings: RolloutSettings,
    store: WeightStore,
    other_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"weights_url": store.url, "watch_interval_s": 0.02, "enable_sleep": True}
    settings = settings.model_copy(update=more)
    engine, load = TorchEngine(settings), torch_engine.load
    reading, go_on = threading.Event(), threading.Event()

    def slow_load(decoder: Decoder, folder: Path) -> DecoderWeights:
        if folder != settings.model_path:
            reading.set()
            go_on.wait(30)
        return load(decoder, folder)

    monkeypatch.setattr(torch_engine, "load", slow_load)
    async with running(create_app(settings, engine)) as client:
        store.publish(1, "run", other_path, ANY_PROOF)
        await async_until(reading.is_set)
        async with asyncio.timeout(60):
            paused = (await client.post("/pause?mode=abort")).json()["paused"]
            resumed = (await client.post("/resume")).json()["paused"]
            old = (await client.post("/generate", json={**ENDLESS, "sampling_params": {"max_tokens": 3}})).json()
        sleeping = asyncio.create_task(client.post("/sleep"))
        await async_until(lambda: engine.paused)
        go_on.set()
        asleep = (await sleeping).json()["asleep"]
        woken = (await client.post("/wake_up?min_weight_version=1")).json()["asleep"]
        assert engine.version == 1

    assert (paused, resumed, asleep, woken) == (True, False, ["kv_cache", "weights"], [])
    assert [span["version"] for span in old["choices"][0]["weight_versions"]] == [0]


async def test_memory_comes_back_in_stages_and_generation_with_the_last(running: Running) -> None:
    settings = RolloutSettings(engine=SIM, enable_sleep=True, replica="replica1")
    async with running(create_app(settings)) as client:
        asleep = (await client.post("/sleep?mode=abort")).json()
        reason = (await client.get("/ready")).json()["reason"]
        refused = await client.post("/resume")
        staged = (await client.post("/wake_up?tags=weights")).json()
        still = (await client.get("/is_paused")).json()
        awake = (await client.post("/wake_up?tags=kv_cache")).json()
        assert (await client.get("/ready")).status_code == 200
    assert asleep == {"is_sleeping": True, "asleep": ["kv_cache", "weights"], "can_sleep": True, "replica": "replica1"}
    assert reason == "kv_cache and weights are asleep; POST /wake_up"
    assert error_of(refused) == (
        *(409, "conflict"),
        "expected all memory to be awake, got kv_cache and weights asleep; POST /wake_up first",
    )
    assert (staged["asleep"], still["is_paused"], awake["is_sleeping"]) == (["kv_cache"], True, False)


async def test_what_a_sleep_retracts_and_what_comes_meanwhile_is_answered_after_the_wake_up(
    running: Running, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "weights")
    sim = {"step_s": 0.002, "step_slope_s": 0.0}
    settings = RolloutSettings(engine=SIM, engine_options=sim, enable_sleep=True, weights_url=url, watch_interval_s=60)
    engine = SimEngine(settings)
    async with running(create_app(settings, engine)) as client:
        begun = asyncio.create_task(client.post("/generate", json=ENDLESS))
        await async_until(lambda: engine.stats().running == 1)
        await client.post("/sleep?mode=retract")
        late = asyncio.create_task(client.post("/generate", json={"token_ids": [11], "min_weight_version": 1}))
        store.publish(1, "run", other_path, ANY_PROOF)
        await client.post("/wake_up?tags=weights&min_weight_version=1")
        waits = not begun.done() and not late.done()
        await client.post("/wake_up?tags=kv_cache")
        [first] = (await begun).json()["choices"]
        [second] = (await late).json()["choices"]

    assert waits
    assert (len(first["token_ids"]), first["finish_reason"], first["weight_versions"][-1]["version"]) == (
        900,
        "length",
        1,
    )
    assert [span["version"] for span in second["weight_versions"]] == [1]


async def test_a_wake_up_answers_when_the_weights_asked_for_are_loaded(
    running: Running, store: WeightStore, other_path: Path, tmp_path: Path
) -> None:
    url = str(tmp_path / "weights")
    settings = RolloutSettings(engine=SIM, enable_sleep=True, weights_url=url, watch_interval_s=60, weight_wait_s=5)
    async with running(create_app(settings)) as client:
        await client.post("/sleep")
        store.publish(3, "run", other_path, ANY_PROOF)
        woken = await client.post("/wake_up?tags=weights&min_weight_version=3")
        held = (await client.get("/weights")).json()["version"]
        await client.post("/wake_up?tags=kv_cache")
        generated = await client.post("/generate", json={"token_ids": [11, 12], "min_weight_version": 3})
    assert (woken.status_code, woken.json()["asleep"], held) == (200, ["kv_cache"], 3)
    assert generated.json()["choices"][0]["weight_versions"][0]["version"] == 3


@ENDS_SOON
async def test_a_wake_up_for_weights_that_do_not_come_says_what_there_is_before_the_deadline(
    running: Running, tmp_path: Path
) -> None:
    settings = RolloutSettings(engine=SIM, enable_sleep=True, weights_url=str(tmp_path / "weights"))
    async with running(create_app(settings)) as client:
        await client.post("/sleep")
        deadline = {"x-request-timeout": "1.0"}
        late = await client.post("/wake_up?min_weight_version=3", headers=deadline)
        assert (await client.get("/ready")).status_code == 200
    assert error_of(late)[:2] == (409, "weights_behind")


async def test_an_engine_that_cannot_sleep_says_what_to_set(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        refused = await client.post("/sleep")
        said = (await client.get("/is_sleeping")).json()
        assert (said["is_sleeping"], said["asleep"], said["can_sleep"]) == (False, [], False)
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
    assert refused.status_code == 422
    assert "got torch with enable_sleep=false; set enable_sleep: true" in refused.json()["error"]["message"]


async def test_the_weight_version_in_vllms_words_and_an_unknown_model(
    running: Running, settings: RolloutSettings
) -> None:
    async with running(create_app(settings)) as client:
        assert (await client.get("/weight_info")).json() == {"weight_version": "0"}
        unknown = await client.post("/generate", json={**ENDLESS, "model": "other"})
    assert error_of(unknown) == (
        *(404, "model_not_found"),
        "model: expected a policy that is served here (tiny, base), got 'other'; see /policies",
    )
