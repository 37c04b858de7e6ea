"""A real model through engines and learners: what is sampled is what is trained, in float32 within 1e-4.

`make test-model` makes the model's folder (a download of 93 MB) and runs these.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_rows import make_rows

from tests.model.real_model import GROUPS, ROLLOUTS, TOKENS, Published, sampled
from trackway.deploy.runs import plot
from trackway.rollout.engines.protocol import Engine
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.trajectory import Trajectory
from trackway.wire.weights import Verdict

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"

pytestmark = [pytest.mark.anyio, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("name", ["torch", "vllm"])
async def test_the_learner_has_the_logprobs_of_what_was_sampled_from_its_weights(
    name: str, published: Published, model: Path, batch: list[Trajectory], request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(f"{name}_engine")
    await engine.load_weights(published.folder, engine.version + 1, published.proof)

    differences = published.differences(await sampled(engine, model))
    before = published.differences(batch)

    print(
        f"{name}: {len(differences)} tokens, largest difference {max(differences):.1e}; old weights {max(before):.1e}"
    )
    assert len(differences) == GROUPS * ROLLOUTS * TOKENS
    assert max(differences) < 1e-4 < 1e-2 < max(before)
    assert engine.judgement is not None and engine.judgement.verdict is Verdict.PROVEN


@pytest.mark.parametrize("seed", os.environ.get("SEEDS", "").split())
def test_held_out_accuracy_rises(seed: str, model: Path, tmp_path: Path) -> None:
    """`make test-model SEEDS='0 1 2'`: the run of the README, some minutes each."""
    make_rows(tmp_path, seed=int(seed))
    files = [f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/held_out.jsonl"]
    words = [*files, f"actor_rollout_ref.model.path={model}", f"trackway.seed={seed}", "trainer.experiment_name=run"]
    command = [sys.executable, "-m", "trackway.deploy.cli", "train", "--config", str(EXAMPLE / "trackway.yaml")]
    subprocess.run([*command, "--outputs", str(tmp_path), "--json", *words], check=True, timeout=3600)

    rows = RunFolder(tmp_path / "run").rows()
    accuracies = [(row.step, value) for row in rows for key, value in row.data.items() if plot.is_accuracy(key)]
    print(f"seed {seed}: {accuracies}")
    assert accuracies[-1][1] >= accuracies[0][1] + 0.15
