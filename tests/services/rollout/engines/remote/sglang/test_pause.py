"""SGLang's protocol: requests are aborted, frozen, drained; its memory is given back and taken again."""

import asyncio
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.services.rollout.engines.remote.sglang.sglang_cases import (
    PROMPT,
    answer,
    in_flight,
    params,
    proof,
    sent,
)
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from trackway.rollout.engines.protocol import Capability
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import WeightSpan

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
Folder = Callable[[int], Path]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]


def test_it_sleeps_only_when_it_was_started_to(folder: Folder) -> None:
    def capabilities(enable_sleep: bool) -> frozenset[Capability]:
        settings = RolloutSettings(model_path=folder(0), engine_url="http://x", enable_sleep=enable_sleep)
        return SglangEngine(settings).capabilities

    assert capabilities(True) == frozenset(Capability)
    assert capabilities(False) == frozenset(Capability) - {Capability.SLEEP}


async def test_memory_is_given_back_in_a_pause_without_requests_only(engine: SglangEngine, fake: Fake) -> None:
    task = await in_flight(engine, fake)
    for pause in (None, "keep"):
        if pause:
            await engine.pause("keep")
        with pytest.raises(TrackwayError, match="expected a paused engine without requests") as raised:
            await engine.sleep(["kv_cache"])
        assert raised.value.code is ErrorCode.CONFLICT
    await engine.pause("abort")
    await task
    await engine.sleep(["kv_cache", "weights"])
    await engine.sleep(["kv_cache"])
    assert engine.asleep == fake.asleep == {"kv_cache", "weights"}
    with pytest.raises(TrackwayError, match="got kv_cache and weights asleep; POST /wake_up first"):
        await engine.resume()


async def test_memory_is_given_back_after_frozen_requests_were_aborted(engine: SglangEngine, fake: Fake) -> None:
    task = await in_flight(engine, fake)
    await engine.pause("keep")
    await engine.abort("long")
    await task
    assert len(fake.requests) == 1
    fake.step_s = 0.2
    await asyncio.sleep(0.05)  # so that its next step is a while away
    await engine.sleep(["kv_cache"])
    assert fake.asleep == {"kv_cache"}


async def test_waking_up_at_once_brings_the_weights_back(engine: SglangEngine, fake: Fake, folder: Folder) -> None:
    await engine.load_weights(folder(1), 1, proof(1))
    await engine.pause("wait")
    await engine.sleep(["weights", "kv_cache"])
    await engine.wake_up(["weights", "kv_cache"])
    await engine.wake_up(["weights", "kv_cache"])
    await engine.resume()
    made = await engine.generate(PROMPT, params(5), "r")
    assert (made.token_ids, made.spans) == (answer(1, 5), [WeightSpan(version=1, start=0, end=5)])


async def test_weights_that_did_not_come_back_may_come_back_at_the_next_wake_up(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    await engine.load_weights(folder(1), 1, proof(1))
    await engine.pause("wait")
    await engine.sleep(["weights", "kv_cache"])
    fake.fail["/update_weights_from_disk"] = (500, {"message": "no room"})
    with pytest.raises(TrackwayError, match=r"weights did not load again after sleep: .*no room") as raised:
        await engine.wake_up(["weights", "kv_cache"])
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert engine.stuck_for() == math.inf
    await engine.wake_up(["weights", "kv_cache"])
    assert engine.stuck_for() == 0.0
    await engine.resume()
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(1, 5)


async def test_weights_are_loaded_between_the_two_stages_of_the_wake_up_and_proved_after(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    await engine.pause("wait")
    await engine.sleep(["weights", "kv_cache"])
    with pytest.raises(TrackwayError, match=r"wake_up\?tags=weights"):
        await engine.load_weights(folder(4), 1, proof(4))
    await engine.wake_up(["weights"])
    assert engine.asleep == fake.asleep == {"kv_cache"}
    await engine.load_weights(folder(4), 1, proof(4))
    assert sent(fake, "/generate") == []
    await engine.wake_up(["kv_cache"])
    assert [body["input_ids"] for body in sent(fake, "/generate")] == [proof(4).probes[0].token_ids]
    await engine.resume()
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)
    assert len(sent(fake, "/update_weights_from_disk")) == 1


async def test_a_proof_that_is_wrong_at_the_wake_up_brings_the_old_weights_back(
    engine: SglangEngine, fake: Fake, folder: Folder
) -> None:
    await engine.pause("wait")
    await engine.sleep(["weights", "kv_cache"])
    await engine.wake_up(["weights"])
    await engine.load_weights(folder(4), 1, proof(5))
    with pytest.raises(TrackwayError, match="got other weights"):
        await engine.wake_up(["kv_cache"])
    assert engine.asleep == frozenset()
    await engine.resume()
    assert engine.version == 0
    assert (await engine.generate(PROMPT, params(5), "r")).token_ids == answer(0, 5)
