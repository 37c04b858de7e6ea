"""Adapters in a real server: what it answers, what requests in flight keep, and wrong ones told by the proof."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType

import httpx
import pytest
import torch
from transformers import PreTrainedModel

from tests.services.rollout.planted_adapters import AdapterVersions, make_adapters
from tests.vllm.test_planted_weights import pairs
from tests.vllm.vllm_runs import (
    BLOCK,
    GREEDY,
    LONG,
    PROMPT,
    SHORT,
    CanBeMisled,
    Weights,
    load,
    proof_of,
    started,
    worst,
)
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.engines.protocol import Generation
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import GenerateReply
from trackway.wire.weights import Verdict, policy_url


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> AdapterVersions:
    """Two versions of a run on the base model, made once."""
    return make_adapters(base, pairs(), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def merged(versions: AdapterVersions) -> dict[str, PreTrainedModel]:
    """Transformers' models with each version merged into them."""
    return {version: load(folder) for version, folder in versions.whole.items()}


@pytest.fixture
async def lora(server: ModuleType, engine: RemoteEngine) -> AsyncIterator[CanBeMisled]:
    """An engine of its own that takes adapters, attached to the session's server, with the base weights."""
    settings = engine.settings.model_copy(update={"engine_url": engine.http.base_url, "max_lora_rank": 8})
    async with started(server.Misled(settings)) as own:
        yield own
        await engine.resume()
        await server.idle(engine)
    assert len((await engine.http.get("/v1/models"))["data"]) == 1  # it took its adapters with it


async def test_an_adapter_answers_as_the_model_that_it_is_merged_into_however_often_it_is_loaded(
    lora: CanBeMisled, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    for version, (adapter, model) in enumerate((("old kept", "1"), ("right", "2"), ("right", "2")), start=1):
        await lora.load_weights(versions.folders[adapter], version, ANY_PROOF)
        made = await lora.generate(PROMPT, GREEDY, "a")
        assert made.spans[0].version == lora.version == version
        assert worst(made, merged[model], GREEDY) < 1e-4


async def test_a_prompt_is_scored_with_the_adapter(
    lora: CanBeMisled, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    ids = torch.tensor([[*PROMPT, *([7, 9] * BLOCK)]])
    for version, (adapter, model) in enumerate((("old kept", "1"), ("right", "2")), start=1):
        await lora.load_weights(versions.folders[adapter], version, ANY_PROOF)
        made = await lora.generate(ids[0].tolist(), SHORT.model_copy(update={"prompt_logprobs": 3}), "a")
        with torch.inference_mode():
            logprobs = merged[model](ids).logits[0, :-1].log_softmax(-1)
        assert made.prompt_logprobs is not None
        expected = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
        assert made.prompt_logprobs.logprobs == pytest.approx(expected, abs=1e-4)
        assert made.prompt_logprobs.top_ids == logprobs.topk(3).indices.tolist()


async def test_no_prefix_computed_with_the_adapter_before_is_reused(
    lora: CanBeMisled, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    prompt = [7, 9] * BLOCK
    await lora.load_weights(versions.folders["old kept"], 1, versions.before)
    await lora.generate(prompt, SHORT, "a")

    await lora.load_weights(versions.folders["right"], 2, versions.proof)

    before = lora.stats().reused_tokens
    made = await lora.generate(prompt, GREEDY, "b")
    assert lora.stats().reused_tokens == before
    assert worst(made, merged["2"], GREEDY, prompt) < 1e-4


async def test_a_request_in_flight_keeps_the_adapter_that_it_began_with_and_says_so(
    server: ModuleType,
    engine: RemoteEngine,
    lora: CanBeMisled,
    versions: AdapterVersions,
    merged: dict[str, PreTrainedModel],
) -> None:
    await lora.load_weights(versions.folders["old kept"], 1, versions.before)
    async with server.slowed(engine):
        task = asyncio.create_task(lora.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        await lora.load_weights(versions.folders["right"], 2, versions.proof)
    made = await task
    assert [(span.version, span.start, span.end) for span in made.spans] == [(1, 0, 300)]
    assert worst(made, merged["1"], LONG) < 1e-4
    assert worst(await lora.generate(PROMPT, GREEDY, "b"), merged["2"], GREEDY) < 1e-4


async def test_whole_weights_of_another_run_come_and_go_between_adapters(
    server: ModuleType,
    engine: RemoteEngine,
    lora: CanBeMisled,
    versions: AdapterVersions,
    second: Weights,
    merged: dict[str, PreTrainedModel],
) -> None:
    await lora.load_weights(versions.folders["right"], 1, versions.proof)
    async with server.slowed(engine):
        task = asyncio.create_task(lora.generate(PROMPT, LONG, "a"))
        await server.busy(engine)
        await lora.load_weights(second.folder, 2, second.proof)
    cut = await task
    assert cut.finish_reason == "abort"  # on other base weights its adapter would be nothing's
    assert {span.version for span in cut.spans} == {1}
    old = Generation(cut.token_ids, cut.logprobs, "abort", [])
    assert worst(old, merged["2"], LONG) < 1e-4
    assert worst(await lora.generate(PROMPT, GREEDY, "b"), second.model, GREEDY) < 1e-4
    await lora.load_weights(versions.folders["right"], 3, versions.proof)
    assert worst(await lora.generate(PROMPT, GREEDY, "c"), merged["2"], GREEDY) < 1e-4


async def test_the_proof_tells_the_traps_of_adapters_and_the_one_before_serves_on(
    server: ModuleType, lora: CanBeMisled, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    verdicts: dict[str, Verdict] = {}
    for number, (fault, folder) in enumerate(versions.folders.items()):
        lora.instead = {}
        await lora.load_weights(versions.folders["old kept"], 2 * number + 1, versions.before)
        lora.instead = {versions.folders["right"]: folder}
        try:
            await lora.load_weights(versions.folders["right"], 2 * number + 2, versions.proof)
        except TrackwayError as error:
            verdicts[fault] = Verdict(str(error.detail["verdict"]))
            assert lora.version == 2 * number + 1
            assert worst(await lora.generate(PROMPT, GREEDY, "a"), merged["1"], GREEDY) < 1e-4
        else:
            assert lora.judgement is not None and lora.judgement.verdict.accepted
            verdicts[fault] = lora.judgement.verdict

    assert verdicts == {
        "right": Verdict.ROUNDED,
        "old kept": Verdict.STALE,
        "scaled twice": Verdict.WRONG,
        "other prefix": server.OTHER_PREFIX,
    }


async def test_an_adapter_that_fails_its_proof_is_taken_back(
    lora: CanBeMisled, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    await lora.load_weights(versions.folders["old kept"], 1, versions.before)

    with pytest.raises(TrackwayError, match=r"off by 0\.5") as raised:
        await lora.load_weights(versions.folders["right"], 2, proof_of(merged["2"], shift=0.5))

    assert (raised.value.code, lora.version) == (ErrorCode.WEIGHTS_CORRUPT, 1)
    assert worst(await lora.generate(PROMPT, GREEDY, "a"), merged["1"], GREEDY) < 1e-4


async def test_a_server_that_takes_no_adapters_gets_them_merged(
    engine: RemoteEngine, versions: AdapterVersions, merged: dict[str, PreTrainedModel]
) -> None:
    await engine.load_weights(versions.folders["right"], engine.version + 1, versions.proof)

    assert worst(await engine.generate(PROMPT, GREEDY, "a"), merged["2"], GREEDY) < 1e-4


async def test_an_adapter_of_other_layers_or_a_larger_rank_is_refused_before_the_server_sees_it(
    lora: CanBeMisled, versions: AdapterVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    small = lora.settings.model_copy(update={"max_lora_rank": 2})
    tries: list[Callable[[], None]] = [lambda: None, lambda: monkeypatch.setattr(lora, "settings", small)]
    for prepare, name in zip(tries, ("other prefix", "right"), strict=True):
        prepare()
        with pytest.raises(TrackwayError) as raised:
            await lora.load_weights(versions.folders[name], 1, ANY_PROOF)
        refused.append(raised.value.message)

    assert "another name or shape in base_model.model.lm.model.layers" in refused[0]
    assert refused[1].startswith("expected an adapter of at most rank 2 in ")
    assert lora.version == 0


async def test_runs_share_a_server_each_with_its_own_adapter_and_versions(
    server: ModuleType,
    engine: VllmEngine | SglangEngine,
    versions: AdapterVersions,
    merged: dict[str, PreTrainedModel],
    tmp_path: Path,
) -> None:
    await engine._call_weights("default")  # the version of a server that has its first weights
    attached = {"engine_url": engine.http.base_url, "max_lora_rank": 8, "engine_shared": True, "engine_args": []}
    settings = [engine.settings.model_copy(update={**attached, "weights_url": str(tmp_path / run)}) for run in "ab"]
    prompt = [7, 9] * BLOCK
    async with started(server.Replica(settings[0])) as first, started(server.Replica(settings[1])) as second:
        await first.load_weights(versions.folders["old kept"], 7, proof_of(merged["1"]))
        async with server.slowed(engine):
            task = asyncio.create_task(first.generate(PROMPT, LONG, "a"))
            await server.busy(engine)
            await second.load_weights(versions.folders["right"], 3, versions.proof)
        made = [await replica.generate(prompt, GREEDY, "b") for replica in (first, second, first)]
        long = await task
        with pytest.raises(TrackwayError, match="for this service alone, got 2 adapters"):
            async with started(server.Replica(engine.settings.model_copy(update={"engine_url": engine.http.base_url}))):
                pass
        await engine._call_weights("5")
        with pytest.raises(TrackwayError, match="got version '5' of a service that does not share it"):
            await second.generate(prompt, GREEDY, "c")

    assert [reply.spans[0].version for reply in made] == [7, 3, 7]
    assert [worst(one, merged[own], GREEDY, prompt) < 1e-4 for one, own in zip(made, "121", strict=True)] == [True] * 3
    assert [worst(made[0], merged["2"], GREEDY, prompt) < 1e-4, worst(made[1], merged["1"], GREEDY, prompt) < 1e-4] == [
        False,
        False,
    ]
    assert [(span.version, span.start, span.end) for span in long.spans] == [(7, 0, 300)]
    assert worst(long, merged["1"], LONG) < 1e-4


@contextlib.asynccontextmanager
async def in_repository() -> AsyncIterator[None]:
    """Where the interpreter of a server that starts finds the tests' scheduler."""
    with contextlib.chdir(Path(__file__).parents[2]):
        yield


@pytest.mark.parametrize("started_here", [False, True])
async def test_policies_share_a_server_as_adapters(
    started_here: bool,
    server: ModuleType,
    engine: VllmEngine | SglangEngine,
    base: Path,
    versions: AdapterVersions,
    merged: dict[str, PreTrainedModel],
    tmp_path: Path,
) -> None:
    await engine._call_weights("default")
    url = str(tmp_path / "weights")
    settings = server.settings_of(base, tmp_path / "server.log") if started_here else engine.settings
    attached = {} if started_here else {"engine_url": engine.http.base_url, "engine_args": []}
    shared = {"max_lora_rank": 8, "engine_shared": True, "weights_url": url}
    app = create_app(settings.model_copy(update={**attached, **shared}))
    published = {"a": ("old kept", versions.before), "b": ("right", versions.proof)}
    for policy, (adapter, proof) in published.items():
        WeightStore(policy_url(url, policy)).publish(1, policy, versions.folders[adapter], proof)
    models = {"a": merged["1"], "b": merged["2"], "base": load(base), engine.settings.model_name: load(base)}
    prompt = [7, 9] * BLOCK
    async with (
        in_repository(),
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rollout", timeout=60.0) as client,
    ):

        async def made(policy: str) -> Generation:
            body = {"model": policy, "token_ids": prompt, "sampling_params": GREEDY.model_dump()}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            [choice] = GenerateReply.model_validate_json(answer.content).choices
            return Generation(choice.token_ids, choice.token_logprobs, "stop", choice.weight_versions)

        made_by = dict(zip(models, await asyncio.gather(*map(made, models)), strict=True))
    assert {policy: made.spans[0].version for policy, made in made_by.items()} == dict(
        zip(models, (1, 1, 0, 0), strict=True)
    )
    assert [worst(made_by[policy], model, GREEDY, prompt) < 1e-4 for policy, model in models.items()] == [True] * 4
    assert worst(made_by["a"], merged["2"], GREEDY, prompt) > 1e-4
