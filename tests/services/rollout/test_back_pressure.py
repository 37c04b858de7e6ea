"""A full service behind a real socket: what it answers, and that clients which obey are all served."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from benchmarks.sim_engine import SimEngine

from tests.serving import served
from tests.waiting import async_until
from trackway.clients import CallPolicy, RolloutClient, close_shared_http
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateRequest, SamplingParams

pytestmark = pytest.mark.anyio

TWICE = CallPolicy(attempts=2, backoff_s=0.01, total_s=60.0)
REQUEST = GenerateRequest(token_ids=[5, 6], sampling_params=SamplingParams(max_tokens=10, ignore_eos=True))


async def full(engine: SimEngine) -> None:
    await async_until(lambda: sum(engine.stats()[:2]) >= 4)


@pytest.fixture
async def engine(step_s: float) -> SimEngine:
    sim = {"step_s": step_s, "step_slope_s": 0.0, "response_tokens": 10}
    return SimEngine(RolloutSettings(max_num_seqs=2, max_queue=2, engine_options=sim))


@pytest.fixture
async def url(engine: SimEngine) -> AsyncIterator[str]:
    async with served(create_app(engine=engine)) as url:
        yield url
        await close_shared_http()


@pytest.mark.parametrize("step_s", [0.002])
async def test_ten_times_the_requests_that_fit_are_all_served_in_the_end(engine: SimEngine, url: str) -> None:
    client = RolloutClient(url, policy=TWICE)
    replies = await asyncio.gather(*(client.generate(REQUEST) for _ in range(40)))
    assert [reply.usage.completion_tokens for reply in replies] == [10] * 40
    async with httpx.AsyncClient() as http:
        metrics = (await http.get(f"{url}/metrics")).text
    [refused] = [line for line in metrics.splitlines() if line.startswith("trackway_requests_total{") and "429" in line]
    assert float(refused.split()[-1]) > 0
    assert engine.stats()[:2] == (0, 0)
    shown = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in metrics.splitlines() if line[0] != "#"}
    tokens = (shown["trackway_engine_generated_tokens_total"], shown["trackway_engine_running"])
    assert (*tokens, shown["trackway_weight_version"], shown["trackway_weight_lag"]) == (400.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("step_s", [3600.0])
async def test_a_full_engine_answers_429_with_whole_seconds_in_the_header(engine: SimEngine, url: str) -> None:
    async with httpx.AsyncClient(timeout=30.0) as http:
        asked = [asyncio.create_task(http.post(f"{url}/generate", json=REQUEST.model_dump())) for _ in range(4)]
        await full(engine)
        refused = await http.post(f"{url}/generate", json=REQUEST.model_dump())
        await engine.pause("abort")
        assert [answer.status_code for answer in await asyncio.gather(*asked)] == [200] * 4
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "18000")
    assert refused.json()["error"]["detail"] == {"bound": 4, "retry_after_s": 18000.0}


@pytest.mark.parametrize("step_s", [3600.0])
async def test_a_client_without_the_time_to_wait_is_told_so_at_once(engine: SimEngine, url: str) -> None:
    client = RolloutClient(url, policy=TWICE)
    asked = [asyncio.create_task(client.generate(REQUEST)) for _ in range(4)]
    await full(engine)
    with pytest.raises(TrackwayError) as raised:
        await client.generate(REQUEST)
    assert raised.value.code is ErrorCode.OVERLOADED
    await engine.pause("abort")
    await asyncio.gather(*asked)
