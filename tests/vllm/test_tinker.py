"""A session of Tinker's SDK whose samples a real vLLM draws, from the adapter that it trains."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tinker
from tinker import types

from tests.serving import served_in_thread
from tests.vllm.vllm_runs import DEADLINE_S, MARKS, started
from trackway.rollout.app import create_app as rollout_app
from trackway.trainer.app import create_app as trainer_app
from trackway.trainer.settings import TrainerSettings

pytestmark = [*MARKS, pytest.mark.extended, pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]

PROMPT = types.ModelInput.from_ints([11, 12, 13])


@pytest.fixture
async def url(server: ModuleType, environment: Path, base: Path, tmp_path: Path) -> AsyncIterator[str]:
    """A trainer service, and a rollout service with a vLLM that serves adapters."""
    more = {"weights_url": str(tmp_path / "store"), "max_lora_rank": 8, "engine_shared": True}
    async with started(server.Replica(server.settings_of(base, tmp_path / "log", **more))) as engine:
        attached = server.settings_of(base, tmp_path / "log", engine_url=engine.http.base_url, **more)
        with served_in_thread(rollout_app(attached)) as rollout_url:
            settings = TrainerSettings(
                outputs_dir=str(tmp_path / "outputs"), weights_url=more["weights_url"], rollout_url=rollout_url
            )
            with served_in_thread(trainer_app(settings)) as trainer_url:
                yield trainer_url


def session(url: str, base: Path) -> dict[str, Any]:
    """Logprobs of a sequence by the sampler and by the trainer, before and after a step."""
    with tinker.ServiceClient(base_url=url, api_key="tml-any") as service:
        trainer = service.create_lora_training_client(str(base), rank=8, seed=1, train_unembed=False).result(DEADLINE_S)
        found: dict[str, Any] = {"drawn": [], "sampler": [], "trainer": [], "scores": []}
        for _ in range(2):
            sampler = trainer.save_weights_and_get_sampling_client().result(DEADLINE_S)
            params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
            drawn = sampler.sample(PROMPT, 2, params).result(DEADLINE_S).sequences
            data = []
            for sequence in drawn:
                tokens = [*PROMPT.to_ints(), *sequence.tokens]
                inputs: Any = {"target_tokens": tokens[1:], "logprobs": [0.0] * 2 + (sequence.logprobs or [])}
                inputs["advantages"] = [0.0] * 2 + [1.0] * len(sequence.tokens)
                data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs))
            backward = trainer.forward_backward(data, "importance_sampling").result(DEADLINE_S)
            trainer.optim_step(types.AdamParams(learning_rate=0.05)).result(DEADLINE_S)
            found["drawn"].append([sequence.tokens for sequence in drawn])
            found["sampler"].append([sequence.logprobs for sequence in drawn])
            found["trainer"].append([out["logprobs"].data[2:] for out in backward.loss_fn_outputs])
            found["scores"].append(sampler.compute_logprobs(PROMPT).result(DEADLINE_S)[1:])
        service.close("success").result(DEADLINE_S)
        return found


async def test_a_sampler_on_vllm_has_the_adapter_of_its_snapshot(url: str, base: Path) -> None:
    found = await asyncio.to_thread(session, url, base)

    for sampler, trainer in zip(found["sampler"], found["trainer"], strict=True):
        assert [len(logprobs) for logprobs in sampler] == [8, 8]
        for ours, theirs in zip(sampler, trainer, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
    assert found["scores"][0] != pytest.approx(found["scores"][1], abs=1e-3)
