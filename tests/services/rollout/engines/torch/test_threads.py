"""An embedded engine computes with as many CPU threads as its model is worth."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.tiny_models import tiny_qwen3
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.serving.app import process_health
from trackway.system.process import usable_cores

pytestmark = pytest.mark.anyio
OTHER = usable_cores() + 1


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """The suite's number of threads, back after each test."""
    before = torch.get_num_threads()
    torch.set_num_threads(OTHER)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2.6 million parameters in an embedding that the output layer shares; 2.7 million in all."""
    return tiny_qwen3(
        tmp_path_factory.mktemp("model"), vocab_size=20_000, hidden_size=128, intermediate_size=128, head_dim=64
    )


async def threads_of(settings: RolloutSettings) -> int | None:
    """What `/health` says while the engine runs."""
    engine = TorchEngine(settings)
    await engine.start()
    try:
        return process_health("rollout", "r").threads
    finally:
        await engine.stop()


async def test_a_small_model_takes_one_thread_and_a_large_one_every_core(large_model: Path) -> None:
    assert await threads_of(RolloutSettings(model_path=TINY_MODEL, device="cpu")) == 1
    assert await threads_of(RolloutSettings(model_path=large_model, device="cpu")) == usable_cores()


async def test_a_number_in_the_settings_goes_before(large_model: Path) -> None:
    assert await threads_of(RolloutSettings(model_path=large_model, device="cpu", threads=3)) == 3


async def test_a_tied_output_layer_counts_once(large_model: Path) -> None:
    engine = TorchEngine(RolloutSettings(model_path=large_model, device="cpu"))
    await engine.start()
    core = engine._core
    assert core is not None
    expected = sum(parameter.numel() for parameter in Qwen3ForCausalLM.from_pretrained(large_model).parameters())
    assert core.weights.parameters() == pytest.approx(expected, rel=1e-3)  # norms of heads are repeated
    await engine.stop()
