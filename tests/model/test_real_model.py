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


async def test_the_embedded_engine_and_the_learner_have_the_same_logprobs(
    torch_engine: Engine, published: Published, model: Path, batch: list[Trajectory]
) -> None:
    await _check("torch", torch_engine, published, model, batch)


async def test_vllm_and_the_learner_have_the_same_logprobs(
    vllm_engine: Engine, published: Published, model: Path, batch: list[Trajectory]
) -> None:
    await _check("vllm", vllm_engine, published, model, batch)


async def _check(name: str, engine: Engine, published: Published, model: Path, batch: list[Trajectory]) -> None:
    await engine.load_weights(published.folder, engine.version + 1, published.proof)

    differences = published.differences(await sampled(engine, model))
    before = published.differences(batch)

    print(
        f"{name}: {len(differences)} tokens, largest difference {max(differences):.1e}; old weights {max(before):.1e}"
    )
    assert len(differences) == GROUPS * ROLLOUTS * TOKENS
    assert max(differences) < 1e-4 < 1e-2 < max(before)
    assert engine.judgement is not None
    # vLLM fuses most tensors and an adapter has no digests: there the answers tell new from old.
    by_digests = name == "torch" and published.proof.digests
    assert engine.judgement.verdict is (Verdict.PROVEN if by_digests else Verdict.ROUNDED)


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
