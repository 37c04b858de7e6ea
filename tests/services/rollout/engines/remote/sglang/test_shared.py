"""Runs that share a server: each has its own adapter and versions, and nothing of one run reaches another."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.services.rollout.engine_runs import started
from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_cases import PROMPT, answer, in_flight, params, proof, sent
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.waiting import async_until
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

Runs = Callable[..., AbstractAsyncContextManager[SglangEngine]]


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[int], Path]:
    """A folder of an adapter by seed."""
    return lambda seed: fakes.write_adapter(tmp_path / f"adapter-{seed}", seed)


@pytest.fixture
async def runs(fake: Fake, tmp_path: Path) -> AsyncIterator[Runs]:
    """`async with runs("a") as engine`: the engine of a run, all attached to one server with two places."""
    base = fakes.write_base(tmp_path / "base", 0)

    @asynccontextmanager
    async def start(run: str, **more: Any) -> AsyncIterator[SglangEngine]:
        settings = {"engine_url": url, "dtype": "float32", "model_path": base, "weights_url": str(tmp_path / run)}
        settings |= {"engine_shared": True, "max_lora_rank": 8, "max_loras": 2, **more}
        async with started(SglangEngine(RolloutSettings(engine="sglang", **settings))) as engine:
            yield engine

    async with fakes.serving(fake, free_port()) as url:
        yield start


async def test_an_adapter_that_fails_its_proof_leaves_both_runs_as_they_were(
    runs: Runs, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first, runs("b") as second:
        await first.load_weights(adapter(4), 1, proof(4))
        like_the_base = adapter(0)
        for version in (0, 1):
            with pytest.raises(TrackwayError) as raised:
                await second.load_weights(like_the_base, version + 1, proof(6))
            assert (raised.value.code, second.version) == (ErrorCode.WEIGHTS_CORRUPT, version)
            if version == 0:
                await second.load_weights(adapter(5), 1, proof(5))
        made = [(await engine.generate(PROMPT, params(5), "r")).token_ids for engine in (first, second)]

    assert made == [answer(4, 5), answer(5, 5)]
    assert (fake.version, sent(fake, "/update_weights_from_disk")) == ("default", [])


async def test_a_run_that_aborts_all_its_requests_leaves_those_of_others(
    runs: Runs, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first, runs("b") as second:
        await first.load_weights(adapter(4), 1, proof(4))
        await second.load_weights(adapter(5), 1, proof(5))
        theirs = await in_flight(second, fake)
        ours = [await in_flight(first, fake, f"{number}") for number in range(2)]
        await first.pause("abort")
        assert [(await task).finish_reason for task in ours] == ["abort", "abort"]
        assert (await theirs).token_ids == answer(5, 200)


async def test_a_run_gets_a_place_when_another_has_ended(
    runs: Runs, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first, runs("c") as third:
        await first.load_weights(adapter(4), 1, proof(4))
        async with runs("b") as second, runs("b") as replica:
            await second.load_weights(adapter(5), 1, proof(5))
            await replica.load_weights(second.control.serving.folder, 1, proof(5))
            with pytest.raises(TrackwayError, match=r"at most 2 runs on .* \(max_loras\), got 2 others") as raised:
                await third.load_weights(adapter(6), 1, proof(6))
            assert (raised.value.code, third.version) == (ErrorCode.CONFLICT, 0)
        assert sorted(fake.adapters.values()) == [4]
        await third.load_weights(adapter(7), 1, proof(7))
        assert (await third.generate(PROMPT, params(5), "r")).token_ids == answer(7, 5)
    assert fake.adapters == {}


async def test_a_replica_keeps_the_adapter_that_serves_and_the_one_before(
    runs: Runs, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first:
        for seed in (4, 5, 6):
            await first.load_weights(adapter(seed), seed, proof(seed))
        await async_until(lambda: sorted(fake.adapters.values()) == [5, 6])


async def test_whole_weights_and_frozen_servers_are_refused_beside_other_runs(
    runs: Runs, folder: Callable[[int], Path], adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first:
        await first.load_weights(adapter(4), 1, proof(4))
        with pytest.raises(TrackwayError, match="expected an adapter for a server that runs share, got whole weights"):
            await first.load_weights(folder(7), 2, proof(7))
        with pytest.raises(TrackwayError, match="expected mode wait or abort on a server that runs share, got keep"):
            await first.pause("keep")
        with pytest.raises(TrackwayError, match="for this service alone, got 1 adapters of runs that share it"):
            async with runs("full", engine_shared=False):
                pass
        assert (await first.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)


async def test_a_server_whose_base_another_service_replaced_is_refused_and_its_answers_too(
    runs: Runs, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    async with runs("a") as first:
        await first.load_weights(adapter(4), 1, proof(4))
        fake.version = "5"
        for _ in range(2):
            with pytest.raises(TrackwayError, match="with the weights that it started with, got version '5'"):
                await first.generate(PROMPT, params(5), "r")
        with pytest.raises(TrackwayError, match="restart the server, and set engine_shared=true for every service"):
            async with runs("b"):
                pass


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ({"engine": "torch"}, "engine=torch"),
        ({"max_lora_rank": 0}, "max_lora_rank=0"),
        ({"enable_sleep": True}, "enable_sleep=true"),
    ],
)
async def test_settings_that_cannot_share_a_server_are_refused(wrong: dict[str, Any], got: str) -> None:
    settings = {"engine": "sglang", "engine_url": "http://x", "max_lora_rank": 8, "engine_shared": True, **wrong}
    with pytest.raises(ValidationError, match=f"expected a vLLM or SGLang server for adapters, got {got}"):
        RolloutSettings.model_validate(settings)
