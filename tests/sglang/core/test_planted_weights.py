"""A real SGLang that loads wrong weights is detected by its answers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.rollout.planted_weights import DEMO, make_versions
from tests.sglang.sglang_runs import MARKS, Misled
from tests.vllm.test_planted_weights import pairs, verdicts
from tests.vllm.vllm_runs import started
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.wire.weights import Verdict

pytestmark = MARKS


@pytest.fixture
async def misled(engine: SglangEngine) -> AsyncIterator[Misled]:
    """An engine of its own, attached to the session's server."""
    own = engine.settings.model_copy(update={"engine_url": engine.http.base_url})
    async with started(Misled(own)) as misled_engine:
        yield misled_engine


async def test_the_proof_tells_planted_weights(misled: Misled, base: Path, tmp_path: Path) -> None:
    versions = make_versions(base, pairs(), tmp_path, "float32", DEMO)

    assert await verdicts(misled, versions) == {
        "right": Verdict.ROUNDED,
        "old kept": Verdict.STALE,
        "one left out": Verdict.WRONG,
        "two swapped": Verdict.WRONG,
        "another run": Verdict.WRONG,
    }
