"""A request that takes a while, and waiting until the engine is at it."""

import asyncio

from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.wire.rollout import SamplingParams

LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
PROMPT = [11, 12, 13]


async def running(engine: TorchEngine, count: int) -> None:
    """Return when `count` requests run and have generated something."""
    async with asyncio.timeout(10):
        while engine.stats().running < count or engine.stats().generated_tokens < count:
            await asyncio.sleep(0)
