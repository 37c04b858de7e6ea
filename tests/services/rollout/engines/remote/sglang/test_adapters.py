"""SGLang's protocol for adapters: each under a name of its own, kept by the requests that began with it."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_cases import (
    LONG,
    PROMPT,
    answer,
    in_flight,
    params,
    proof,
    sent,
)
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.waiting import async_until
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.trajectory import WeightSpan

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
Starts = Callable[..., AbstractAsyncContextManager[SglangEngine]]


@pytest.fixture
def adapter(tmp_path: Path) -> Callable[[int], Path]:
    """A folder of an adapter by seed."""
    return lambda seed: fakes.write_adapter(tmp_path / f"adapter-{seed}", seed)


@pytest.fixture
async def lora(starts: Starts, tmp_path: Path) -> AsyncIterator[SglangEngine]:
    """An engine that takes adapters."""
    async with starts(max_lora_rank=8, model_path=fakes.write_base(tmp_path / "base", 0)) as engine:
        yield engine


async def test_a_request_in_flight_keeps_its_adapter_and_only_the_last_few_stay_loaded(
    lora: SglangEngine, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    await lora.load_weights(adapter(1), 1, proof(1))
    task = await in_flight(lora, fake)
    for seed in (2, 3, 4, 5, 6):
        await lora.load_weights(adapter(seed), seed, proof(seed))
    made = await task

    assert (made.token_ids, made.spans) == (answer(1, 200), [WeightSpan(version=1, start=0, end=200)])
    await async_until(lambda: sorted(fake.adapters.values()) == [3, 4, 5, 6])


async def test_a_replica_that_stops_takes_its_adapters_with_it(
    starts: Starts, fake: Fake, adapter: Callable[[int], Path], tmp_path: Path
) -> None:
    async with starts(max_lora_rank=4, model_path=fakes.write_base(tmp_path / "own-base", 0)) as engine:
        await engine.load_weights(adapter(4), 1, proof(4))
        await engine.load_weights(adapter(5), 2, proof(5))
        reader = engine.stream(PROMPT, LONG, "read-slowly")
        await anext(reader)  # and no more: the stop does not wait for this request
        assert sorted(fake.adapters.values()) == [4, 5]
        await engine.stop()
        assert fake.adapters == {}


async def test_after_sleep_the_base_and_the_adapter_are_loaded_again(
    lora: SglangEngine, fake: Fake, adapter: Callable[[int], Path]
) -> None:
    await lora.load_weights(adapter(4), 1, proof(4))
    await lora.pause("abort")
    await lora.sleep(["weights", "kv_cache"])
    await lora.wake_up(["weights", "kv_cache"])
    await lora.resume()

    assert (await lora.generate(PROMPT, params(5), "r")).token_ids == answer(4, 5)
    assert len(sent(fake, "/update_weights_from_disk")) == 1


def test_a_server_is_told_of_a_longest_sequence_that_the_models_folder_does_not_name(tmp_path: Path) -> None:
    base = fakes.write_base(tmp_path / "base", 0)
    options = {"--json-model-override-args": SglangEngine, "--hf-overrides": VllmEngine}
    own: dict[str, Any] = {"engine_python": Path("python"), "model_path": base}

    for option, kind in options.items():
        settings = RolloutSettings(**own, max_position_embeddings=900)
        command = kind(settings)._command(1)
        assert json.loads(command[command.index(option) + 1]) == {"max_position_embeddings": 900}
        assert kind(settings).max_len == (894 if kind is SglangEngine else 900)
        assert option not in kind(RolloutSettings(**own))._command(1)
        with pytest.raises(
            ValueError, match=rf"engine_args: expected no {option} with .*max_position_embeddings.: 900"
        ):
            RolloutSettings(**own, max_position_embeddings=900, engine_args=[f"{option}={{}}"])


def test_a_server_is_told_of_a_float32_head(tmp_path: Path) -> None:
    base = fakes.write_base(tmp_path / "base", 0)
    own: dict[str, Any] = {"engine_python": Path("python"), "model_path": base, "float32_head": True}

    vllm = VllmEngine(RolloutSettings(**own, engine="vllm", max_position_embeddings=900))._command(1)
    sglang = SglangEngine(RolloutSettings(**own, engine="sglang"))._command(1)

    overrides = json.loads(vllm[vllm.index("--hf-overrides") + 1])
    assert overrides == {"max_position_embeddings": 900, "head_dtype": "float32"}
    assert ("--enable-fp32-lm-head" in sglang, "--json-model-override-args" in sglang) == (True, False)


def test_the_server_is_started_for_adapters(tmp_path: Path) -> None:
    base = fakes.write_base(tmp_path / "base", 0)
    settings = RolloutSettings(engine="sglang", engine_python=Path("python"), model_path=base, max_lora_rank=12)

    command = SglangEngine(settings)._command(1)

    assert "--enable-lora" in command
    assert command[command.index("--max-lora-rank") + 1] == "12"
