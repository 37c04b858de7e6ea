"""A real SGLang does what the guide's table of differences between engines says."""

import pytest

from tests.services.rollout.engines.side_by_side import OBSERVERS, cells
from tests.sglang.sglang_runs import MARKS
from tests.vllm.vllm_runs import Weights
from trackway.rollout.engines.remote.sglang import SglangEngine

pytestmark = MARKS


@pytest.mark.parametrize("row", OBSERVERS)
async def test_sglang_does_what_the_guide_says(engine: SglangEngine, first: Weights, row: str) -> None:
    assert await OBSERVERS[row](engine, first) == cells()[row]["sglang"]
