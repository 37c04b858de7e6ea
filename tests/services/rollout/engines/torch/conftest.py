"""An engine with two slots and a queue of one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.rollout.engine_runs import started
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings


@pytest.fixture
def settings(model_path: Path) -> RolloutSettings:
    """Two slots, one place in the queue."""
    return RolloutSettings(model_path=model_path, max_num_seqs=2, max_queue=1, device="cpu")


@pytest.fixture
async def engine(settings: RolloutSettings) -> AsyncIterator[TorchEngine]:
    """Started, and stopped after the test."""
    async with started(TorchEngine(settings)) as engine:
        yield engine
