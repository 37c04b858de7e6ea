"""The trainer and two SGLang replicas on the same GPUs: who is told what, and in which order."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.services.rollout.engines.remote.sglang.sglang_cases import proof
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake, serving, write_weights
from tests.services.rollout.replica_group import Group
from trackway.clients.weights import WeightStore
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.trainer.loop.colocation import Engines, Sharing

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

ENDLESS = {"token_ids": [11, 12], "sampling_params": {"max_tokens": 900, "ignore_eos": True}}
LOOKED_AT = {"/release_memory_occupation", "/resume_memory_occupation", "/update_weights_from_disk", "/generate"}


async def test_the_trainer_puts_two_sglang_replicas_to_sleep_and_wakes_them_with_its_new_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    group = Group(monkeypatch)
    base, new = write_weights(tmp_path / "base", 0), write_weights(tmp_path / "new", 4)
    fakes, store = [Fake(base), Fake(base)], WeightStore(str(tmp_path / "store"))
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake, free_port())) for fake in fakes]
        common = {"engine": "sglang", "model_path": base, "dtype": "float32", "enable_sleep": True}
        following = {**common, "weights_url": str(tmp_path / "store"), "watch_interval_s": 60}
        settings = [RolloutSettings.model_validate({**following, "engine_url": url}) for url in urls]
        client = await stack.enter_async_context(group.running(*settings))
        engines = Engines(client, Sharing(timeout_s=30.0))
        before = [len(fake.calls) for fake in fakes]
        await engines.sleep()
        asleep = [fake.asleep.copy() for fake in fakes]
        store.publish(1, "run", new, proof=proof(4))
        await engines.wake_up(1)
        after = [len(fake.calls) for fake in fakes]
        made = [
            (await http.post("/generate", json={**ENDLESS, "min_weight_version": 1})).json() for http in group.https
        ]
    told = [
        [(path, body.get("tags") or body.get("weight_version")) for path, body in fake.calls[start:end]]
        for fake, start, end in zip(fakes, before, after, strict=True)
    ]
    assert asleep == [{"weights", "kv_cache"}] * 2
    assert [[call for call in calls if call[0] in LOOKED_AT] for calls in told] == [
        [
            ("/release_memory_occupation", ["weights"]),
            ("/release_memory_occupation", ["kv_cache", "cuda_graph"]),
            ("/resume_memory_occupation", ["weights"]),
            ("/update_weights_from_disk", "1"),
            ("/resume_memory_occupation", ["kv_cache", "cuda_graph"]),
            ("/generate", None),  # the proof
        ]
    ] * 2
    assert [fake.crimes for fake in fakes] == [[], []]
    assert [{span["version"] for span in reply["choices"][0]["weight_versions"]} for reply in made] == [{1}, {1}]
