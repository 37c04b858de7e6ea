"""An evaluation of a real server's model, by its URL and by its folder."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.vllm.vllm_runs import started
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.runs import evaluate
from trackway.deploy.runs.evaluate import Options
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.trainer.data import make_tiny

ROWS = 12


@pytest.fixture(scope="module")
async def url(server: ModuleType, environment: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """URL of a server with the demo's model, its chat template and its tool calls."""
    settings = server.settings_of(TINY_MODEL, tmp_path_factory.mktemp("chat") / "log", engine_tokenizer=True)
    settings.engine_args.extend(server.TOOL_ARGUMENTS)
    async with started(server.Replica(settings)) as engine:
        yield f"{engine.http.base_url}/v1"


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's rows, and an empty outputs folder in the working folder."""
    monkeypatch.chdir(tmp_path)
    make_tiny(tmp_path / "data", train_size=ROWS, test_size=ROWS, seed=0)
    return tmp_path / "data" / "test.parquet"


def evaluated(what: str, rows: Path, **options: object) -> Evaluation:
    chosen = Options(**{"rows": rows, "temperature": 0.0, **options})
    run = evaluate.prepare(what, chosen, [], None, "tiny_demo", Path("outputs"))
    findings, read = run.check(lambda name, state: None)
    findings.refuse()
    assert read is not None
    return run.run(read, lambda name, state: None, lambda rollouts, left: None)


async def test_a_model_has_the_same_greedy_answers_and_scores_by_url_and_by_folder(url: str, rows: Path) -> None:
    remote = await asyncio.to_thread(evaluated, url, rows, name="remote")
    local = await asyncio.to_thread(evaluated, str(TINY_MODEL), rows, name="local")

    assert remote.summary is not None and local.summary is not None
    assert (remote.summary.rollouts, remote.summary.failed) == (local.summary.rollouts, local.summary.failed) == (12, 0)
    there, here = (EvaluationStore(Path("outputs") / name).trajectories() for name in ("remote", "local"))
    assert [found.turns[0].messages[0].content for found in there] == [
        found.turns[0].messages[0].content for found in here
    ]
    assert [found.reward and found.reward.score for found in there] == [
        found.reward and found.reward.score for found in here
    ]


async def test_sampled_answers_need_no_seed(url: str, rows: Path) -> None:
    sampled = await asyncio.to_thread(evaluated, url, rows, name="sampled", n=4, limit=3, temperature=1.0, no_seed=True)

    assert sampled.summary is not None
    assert (sampled.summary.rollouts, sampled.summary.failed) == (12, 0)
