"""Several policies on one replica: each by its name, with weights, versions and cache of its own."""

import asyncio
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Protocol

import httpx
import psutil
import pytest
from fastapi import FastAPI

from tests.services.rollout.idle_engine import IdleEngine
from tests.waiting import async_until
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.rollout import app
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import GeneratePiece
from trackway.wire.weights import policy_url

pytestmark = pytest.mark.anyio

PROMPT = [11, 12, 13]


class Running(Protocol):
    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "weights")


@pytest.fixture
def settings(model_path: Path, url: str) -> RolloutSettings:
    return RolloutSettings(model_path=model_path, weights_url=url, device="cpu", weight_wait_s=5.0, max_num_seqs=4)


def publish(url: str, policy: str | None, version: int, folder: Path) -> None:
    store = WeightStore(url if policy is None else policy_url(url, policy))
    store.publish(version, policy or "run", folder, ANY_PROOF)


async def tokens(client: httpx.AsyncClient, model: str | None, version: int = 0) -> list[int]:
    [choice] = (await answered(client, model, version)).json()["choices"]
    assert {span["version"] for span in choice["weight_versions"]} == {version}
    return choice["token_ids"]


async def answered(client: httpx.AsyncClient, model: str | None, version: int = 0) -> httpx.Response:
    params = {"max_tokens": 12, "seed": 5, "ignore_eos": True}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": params, "min_weight_version": version}
    return await client.post("/generate", json=body)


async def loaded(client: httpx.AsyncClient) -> list[str]:
    policies = (await client.get("/policies")).json()["policies"]
    return [policy["name"] for policy in policies if policy["loaded"]]


async def test_each_policy_generates_what_it_generates_alone(
    running: Running, settings: RolloutSettings, url: str, folders
) -> None:
    weights = {None: folders("qwen3-gqa", 0), "first": folders("qwen3-gqa", 1), "first:8": folders("qwen3-gqa", 2)}
    for (policy, folder), version in zip(weights.items(), (3, 1, 2), strict=True):
        publish(url, policy, version, folder)
    alone = {}
    for policy, folder in weights.items():
        own = settings.model_copy(update={"model_path": folder, "weights_url": None})
        async with running(create_app(own)) as client:
            alone[policy] = await tokens(client, None)
    async with running(create_app(settings)) as client:
        asked = [(None, 3), ("first", 1), ("first:8", 2)] * 3
        together = await asyncio.gather(*(tokens(client, policy, version) for policy, version in asked))
        base = await tokens(client, "base")
        reply = (await answered(client, "first")).json()
        listed = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
        metrics = (await client.get("/metrics")).text
    assert together == [alone[policy] for policy, _ in asked]
    assert len({tuple(ids) for ids in alone.values()}) == 3
    assert base == alone[None]  # the folder that the replica starts with
    assert reply["model"] == "first"
    assert listed == ["policy", "first", "first:8"]
    assert 'trackway_policy_weight_version{policy="first:8"} 2.0' in metrics
    assert 'gen_ai_client_inference_usage_output_tokens_total{gen_ai_operation_name="chat",' in metrics
    assert 'gen_ai_request_model="first"} 48.0' in metrics


async def test_a_policy_follows_its_own_store(
    running: Running, settings: RolloutSettings, url: str, other_path: Path, model_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings)) as client:
        old = await tokens(client, "run", 1)
        publish(url, "run", 2, model_path)
        new = await tokens(client, "run", 2)
        default = (await client.get("/weights")).json()
        own = (await client.get("/weights", params={"model": "run"})).json()
    assert (default["version"], own["version"], own["model"]) == (0, 2, "run")
    assert old != new


@pytest.mark.parametrize("name", ["absent", "../../weights", "run/1", "run:", "run:x", ""])
async def test_a_policy_without_weights_is_a_404(
    running: Running, settings: RolloutSettings, url: str, other_path: Path, name: str
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings)) as client:
        answer = await answered(client, name)
        chat = await client.get("/v1/models/absent")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["message"] == (
        f"model: expected a policy that is served here (policy, base, run), got {name!r}; see /policies"
    )
    assert chat.status_code == 404


async def test_the_least_recently_used_idle_policy_leaves_and_comes_back(
    running: Running, settings: RolloutSettings, url: str, folders
) -> None:
    for number, name in enumerate(("a", "b", "c")):
        publish(url, name, 1, folders("qwen3-gqa", number))
    async with running(create_app(settings.model_copy(update={"max_policies": 3}))) as client:
        first = {name: await tokens(client, name, 1) for name in ("a", "b")}
        assert await tokens(client, "a", 1) == first["a"]
        await tokens(client, "c", 1)
        assert await loaded(client) == ["policy", "a", "c"]
        assert await tokens(client, "b", 1) == first["b"]
        assert await loaded(client) == ["policy", "b", "c"]
        metrics = (await client.get("/metrics")).text
    assert "trackway_policy_evictions_total 2.0" in metrics


async def test_a_policy_without_a_place_is_a_503(
    running: Running, settings: RolloutSettings, url: str, folders
) -> None:
    for number, name in enumerate(("a", "b")):
        publish(url, name, 1, folders("qwen3-gqa", number))
    endless = {"model": "a", "token_ids": PROMPT, "sampling_params": {"max_tokens": 3000, "ignore_eos": True}}
    async with running(create_app(settings.model_copy(update={"max_policies": 2}))) as client:
        task = asyncio.create_task(client.post("/generate", json={**endless, "request_id": "long"}))

        async def begun() -> bool:
            return 'trackway_policy_requests{policy="a"} 1.0' in (await client.get("/metrics")).text

        await async_until(begun, within_s=60)
        refused = await answered(client, "b")
        await async_until(lambda: _aborted(client, "a"), within_s=60)
        await task
        assert await tokens(client, "b", 1)
    assert (refused.status_code, refused.json()["error"]["retryable"]) == (503, True)
    assert refused.json()["error"]["message"] == (
        "expected a place for policy 'b', got policy, a in use and max_policies=2; retry later"
    )


async def _aborted(client: httpx.AsyncClient, model: str) -> bool:
    return (await client.post("/abort_requests", params={"model": model})).json()["aborted"] == 1


async def test_a_policy_leaves_for_another_where_memory_is_short(
    running: Running, settings: RolloutSettings, url: str, folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("a", "b")):
        publish(url, name, 1, folders("qwen3-gqa", number))
    free = [2e9, 0.0, 2e9]
    async with running(create_app(settings)) as client:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free.pop(0)))
        await tokens(client, "a", 1)
        await tokens(client, "b", 1)
        assert await loaded(client) == ["policy", "b"]
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0.0))
        refused = await answered(client, "a")
        assert await loaded(client) == ["policy"]
    assert refused.json()["error"]["message"] == (
        "expected a place for policy 'a', got policy in use and 0.0 GB of free memory for 0.0 GB; retry later"
    )


async def test_a_policy_whose_weights_were_removed_is_unknown(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings)) as client:
        first = await tokens(client, "run", 1)
        shutil.rmtree(policy_url(url, "run"))

        async def unknown() -> bool:
            return (await answered(client, "run")).status_code == 404

        await async_until(unknown)
        assert await loaded(client) == ["policy"]
        publish(url, "run", 1, other_path)
        assert await tokens(client, "run", 1) == first


async def test_a_service_for_one_policy_names_the_setting(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings.model_copy(update={"max_policies": 1}))) as client:
        answer = await answered(client, "run")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "expected a service for several policies, got max_policies=1 for 'run'; raise max_policies"
    )


SERVER = {"engine": "vllm", "engine_url": "http://127.0.0.1:9", "max_lora_rank": 8}


async def test_a_server_that_is_not_shared_names_the_setting(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings.model_copy(update=SERVER), IdleEngine())) as client:
        answer = await answered(client, "run")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "expected a service for several policies, got engine=vllm without engine_shared for 'run'; set "
        "engine_shared=true and max_lora_rank, for runs that publish adapters"
    )


async def test_a_shared_server_holds_as_many_adapters_as_it_has_places(
    running: Running, settings: RolloutSettings, url: str, folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate((None, "a", "b")):
        publish(url, name, 1, folders("qwen3-gqa", number))
    monkeypatch.setattr(app, "open_engine", lambda settings: IdleEngine())
    shared = {**SERVER, "engine_shared": True, "max_loras": 2}
    async with running(create_app(settings.model_copy(update=shared), IdleEngine())) as client:
        for model in ("a", "base", "b"):
            assert (await answered(client, model)).status_code == 200
        held = await loaded(client)
        limits = (await client.get("/policies")).json()["limits"]
    async with running(create_app(settings.model_copy(update={**shared, "max_loras": 1}), IdleEngine())) as client:
        refused = await answered(client, "a")
    assert held == ["policy", "base", "b"]  # the default one has an adapter, and the base none
    assert (limits["max_policies"], limits["max_adapters"], limits["max_lora_rank"]) == (4, 2, 8)
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503,
        "expected a place for policy 'a', got policy in use and max_loras=1; retry later",
    )


async def test_a_pause_holds_the_named_policy_alone(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings)) as client:
        unloaded = await client.post("/pause", params={"model": "run", "mode": "keep"})
        await tokens(client, "run", 1)
        paused = await client.post("/pause", params={"model": "run", "mode": "keep"})
        refused = await answered(client, "run")
        assert await tokens(client, None)
        await client.post("/resume", params={"model": "run"})
        assert await tokens(client, "run", 1)
    assert unloaded.json()["error"]["message"] == (
        "expected a policy that this replica has loaded (policy), got 'run'; use it first"
    )
    assert (paused.json()["paused"], refused.status_code) == (True, 503)


async def test_a_sleep_and_a_wake_up_act_on_the_named_policy_alone(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    async with running(create_app(settings.model_copy(update={"enable_sleep": True}))) as client:
        before = await tokens(client, None), await tokens(client, "run", 1)
        asleep = (await client.post("/sleep", params={"model": "run"})).json()
        default = (await client.get("/is_sleeping")).json()
        refused = await answered(client, "run")
        meanwhile = await tokens(client, None)
        await client.post("/wake_up", params={"model": "run"})
        after = await tokens(client, None), await tokens(client, "run", 1)
    assert (asleep["asleep"], default["asleep"]) == (["kv_cache", "weights"], [])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "paused")
    assert (meanwhile, after) == (before[0], before)


async def test_the_update_mode_of_a_run_is_that_of_its_policy_alone(
    running: Running, settings: RolloutSettings, url: str, other_path: Path, model_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    params = {"max_tokens": 1000, "seed": 5, "ignore_eos": True}
    changes = {"watch_interval_s": 0.02}
    async with running(create_app(settings.model_copy(update=changes))) as client:

        def begin(model: str | None) -> asyncio.Task[httpx.Response]:
            body = {"model": model, "token_ids": PROMPT, "sampling_params": params}
            return asyncio.create_task(client.post("/generate", json=body))

        await tokens(client, "run", 1)
        alone = (await begin(None)).json()["choices"][0]["token_ids"]
        updates = [begin(None), begin("run")]

        async def begun() -> bool:
            admitted = 'trackway_policy_requests{policy="run"} 1.0' in (await client.get("/metrics")).text
            if not admitted or (await client.get("/load")).json()["running"] == 0:
                return False
            frozen = (await client.post("/pause", params={"mode": "keep", "model": "run"})).json()
            await client.post("/resume", params={"model": "run"})
            return frozen["running"] == 1

        await async_until(begun, within_s=20)
        store = WeightStore(policy_url(url, "run"))
        store.publish(2, "run", model_path, ANY_PROOF, update_mode="abort")
        default, run = [(await update).json()["choices"][0] for update in updates]
    assert (default["token_ids"], [span["version"] for span in default["weight_versions"]]) == (alone, [0])
    first, second = run["weight_versions"]
    assert (first["version"], second["version"], second.get("kv_version")) == (
        1,
        2,
        None,
    )  # its cache is computed again


async def test_weights_that_do_not_load_are_told_and_leave_the_others(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    [damaged] = (Path(policy_url(url, "run")) / "1").glob("*.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    async with running(create_app(settings)) as client:
        answer = await answered(client, "run")
        assert await tokens(client, None)
    assert answer.status_code == 503
    assert "sha256" in answer.json()["error"]["message"]


async def test_a_stream_names_its_policy(
    running: Running, settings: RolloutSettings, url: str, other_path: Path
) -> None:
    publish(url, "run", 1, other_path)
    body = {
        "model": "run",
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 12, "seed": 5, "ignore_eos": True},
    }
    async with running(create_app(settings)) as client:
        whole = await tokens(client, "run", 1)
        async with client.stream("POST", "/generate_stream", json=body) as lines:
            pieces = [GeneratePiece.model_validate_json(line) async for line in lines.aiter_lines()]
    assert [token for piece in pieces for token in piece.token_ids] == whole
