"""A real SGLang that loads wrong weights is detected by its answers, and by digests that stay as they were."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.rollout.planted_weights import DEMO, USUAL, make_versions
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


async def test_digests_tell_weights_that_stayed_where_answers_tell_nothing(
    misled: Misled, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_before(_: object) -> None:
        return None

    monkeypatch.setattr(misled.control, "_dtype", "bfloat16")  # whose rounding hides such a step
    monkeypatch.setattr(misled.control, "_score_before", none_before)  # as while the KV cache sleeps
    versions = make_versions(base, pairs(), tmp_path, "bfloat16", USUAL)

    found = await verdicts(misled, versions)

    assert (found["right"], found["old kept"]) == (Verdict.INDISTINGUISHABLE, Verdict.STALE)
    assert found["one left out"].accepted  # q_proj, whose digest is one with those of k_proj and v_proj
