"""The engine, attached to a fake that runs in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.services.rollout.engine_runs import started
from tests.services.rollout.engines.remote.sglang import sglang_fake as fakes
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[int], Path]:
    """A folder of weights by seed."""
    return lambda seed: fakes.write_weights(tmp_path / f"weights-{seed}", seed)


@pytest.fixture
async def fake(folder: Callable[[int], Path]) -> AsyncIterator[Fake]:
    """The scheduler behind `engine`; whatever would have ended a real one fails the test."""
    fake = Fake(folder(0))
    yield fake
    assert fake.crimes == []


@pytest.fixture
def starts(fake: Fake, folder: Callable[[int], Path]) -> Callable[..., AbstractAsyncContextManager[SglangEngine]]:
    """`async with starts(setting=value) as engine`, attached to the fake."""

    @asynccontextmanager
    async def start(**more: Any) -> AsyncIterator[SglangEngine]:
        async with fakes.serving(fake, free_port()) as url:
            chosen = {"engine_url": url, "dtype": "float32", "enable_sleep": True, "model_path": folder(0), **more}
            settings = RolloutSettings(engine="sglang", **chosen)
            async with started(SglangEngine(settings)) as engine:
                yield engine

    return start


@pytest.fixture
async def engine(
    starts: Callable[..., AbstractAsyncContextManager[SglangEngine]],
) -> AsyncIterator[SglangEngine]:
    """With sleep, in float32."""
    async with starts() as engine:
        yield engine
