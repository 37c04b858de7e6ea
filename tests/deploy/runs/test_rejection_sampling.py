"""Rollouts with a reward above a bound, exported as rows of supervised training: their ids are the rollouts' own."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trackway.chat.tokens import ChatTokens
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.cli import app
from trackway.deploy.runs import evaluate
from trackway.deploy.runs.evaluate import Options
from trackway.evaluation.store import EvaluationStore
from trackway.run_config.models import DataConfig
from trackway.trainer.data.conversations import encoded, load_conversations
from trackway.trainer.data.dataset import ALL_ROWS
from trackway.trainer.data.row_files import write_rows
from trackway.trainer.data.tiny import make_tiny_rows

pytestmark = pytest.mark.slow


def test_exported_rollouts_are_encoded_to_their_own_ids_and_mask(tmp_path: Path):
    rows, outputs, target = tmp_path / "rows.parquet", tmp_path / "outputs", tmp_path / "sft.jsonl"
    write_rows(rows, make_tiny_rows("train", 24, seed=0))
    options = Options(rows=rows, n=2, name="sampled")
    prepared = evaluate.prepare(str(TINY_MODEL), options, [], None, "tiny_demo", outputs)
    findings, read = prepared.check(lambda name, state: None)
    findings.refuse()
    assert read is not None
    prepared.run(read, lambda name, state: None, lambda rollouts, left: None)

    words = ["export", "sampled", str(target), "--as", "chat", "--validation", "--where", "score > 0.5"]
    exported = CliRunner().invoke(app, [*words, "--outputs", str(outputs)])
    assert exported.exit_code == 0, exported.output
    tokens = ChatTokens.load(str(TINY_MODEL))
    found = encoded(load_conversations([str(target)], ALL_ROWS, DataConfig()), tokens, DataConfig())

    rollouts = [t for t in EvaluationStore(outputs / "sampled").trajectories() if t.reward and t.reward.score > 0.5]
    assert len(rollouts) >= 8 and {len(rollout.turns) for rollout in rollouts} == {2}
    assert [list(row.ids) for row in found] == [rollout.prompt_ids + rollout.response_ids for rollout in rollouts]
    masks = [[0] * len(rollout.prompt_ids) + rollout.response_mask for rollout in rollouts]
    assert [list(row.mask) for row in found] == masks
