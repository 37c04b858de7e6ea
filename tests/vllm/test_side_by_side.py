"""A real vLLM does what the guide's table of differences between engines says."""

import pytest

from tests.services.rollout.engines.side_by_side import OBSERVERS, cells
from tests.vllm.vllm_runs import MARKS, Weights
from trackway.rollout.engines.remote.vllm import VllmEngine

pytestmark = MARKS


@pytest.mark.parametrize("row", OBSERVERS)
async def test_vllm_does_what_the_guide_says(engine: VllmEngine, first: Weights, row: str) -> None:
    assert await OBSERVERS[row](engine, first) == cells()[row]["vllm"]
