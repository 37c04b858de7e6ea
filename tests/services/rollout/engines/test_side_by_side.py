"""The embedded engine does what the guide's table says; vLLM and SGLang are in tests/vllm and tests/sglang."""

from collections.abc import AsyncIterator

import pytest

from tests.services.rollout.engine_runs import started
from tests.services.rollout.engines.side_by_side import OBSERVERS, cells
from tests.vllm.conftest import base, first
from tests.vllm.vllm_runs import Weights
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings

__all__ = ["base", "first"]


@pytest.fixture
async def engine(first: Weights) -> AsyncIterator[TorchEngine]:
    """The embedded engine with the model that vLLM and SGLang have."""
    async with started(TorchEngine(RolloutSettings(model_path=first.folder, device="cpu"))) as engine:
        yield engine


def test_each_row_of_the_guide_is_tested() -> None:
    assert list(cells()) == list(OBSERVERS)


@pytest.mark.anyio
@pytest.mark.parametrize("row", OBSERVERS)
async def test_the_embedded_engine_does_what_the_guide_says(engine: TorchEngine, first: Weights, row: str) -> None:
    assert await OBSERVERS[row](engine, first) == cells()[row]["torch"]
