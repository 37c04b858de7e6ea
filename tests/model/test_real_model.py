"""A real model through engines and learners: what is sampled is what is trained, in float32 within 1e-4.

`make test-model` makes the model's folder (a download of 93 MB) and runs these.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from make_rows import make_rows

from tests.model.real_model import ALPHA, GROUPS, RANK, ROLLOUTS, TOKENS, Published, sampled
from tests.services.rollout.planted_adapters import changed, other_prefix, scaled
from tests.vllm.vllm_runs import Misled
from trackway.deploy.runs import demo
from trackway.rollout.engines.protocol import Engine
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import TrackwayError
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


@pytest.mark.parametrize("published", ["LoRA, 1 rank", "LoRA, 2 ranks"], indirect=True)
async def test_vllm_with_the_adapter_loaded_by_its_routes_and_the_learner_have_the_same_logprobs(
    adapter_engine: Misled, published: Published, model: Path, batch: list[Trajectory]
) -> None:
    await _check("vllm, adapter", adapter_engine, published, model, batch)

    cards = (await adapter_engine.http.get("/v1/models"))["data"]
    assert str(published.folder) in [card["root"] for card in cards]


@pytest.mark.parametrize("published", ["LoRA, 1 rank"], indirect=True)
async def test_an_adapter_with_a_wrong_prefix_or_scaled_twice_is_noticed(
    adapter_engine: Misled, published: Published, tmp_path: Path
) -> None:
    folder, proof = published.folder, published.proof
    prefix = changed(folder, tmp_path / "prefix", other_prefix)
    twice = changed(folder, tmp_path / "twice", lambda tensors: scaled(tensors, ALPHA / RANK))
    with pytest.raises(TrackwayError, match=r"another name or shape in base_model\.model\.lm\.model\.layers"):
        await adapter_engine.load_weights(prefix, adapter_engine.version + 1, proof)

    verdicts: list[str] = []
    for planted in (prefix, twice):  # past that check, as if the server had done it
        adapter_engine.instead = {folder: planted}
        with pytest.raises(TrackwayError) as raised:
            await adapter_engine.load_weights(folder, adapter_engine.version + 1, proof)
        verdicts.append(str(raised.value.detail["verdict"]))
        print(f"vllm, adapter with a planted fault: {raised.value.message}")
    adapter_engine.instead = {}

    assert verdicts == [Verdict.STALE, Verdict.WRONG]  # the base, which vLLM answers as, is the version before


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
    # vLLM fuses most tensors and an adapter has no digests: there the answers show that the weights are the new ones.
    by_digests = name == "torch" and published.proof.digests
    assert engine.judgement.verdict is (Verdict.PROVEN if by_digests else Verdict.ROUNDED)


@pytest.mark.parametrize("seed", os.environ.get("SEEDS", "").split())
def test_held_out_accuracy_rises(seed: str, model: Path, tmp_path: Path) -> None:
    """`make test-model SEEDS='0 1 2'`: the run of the README, some minutes each."""
    accuracies = _held_out_accuracies(seed, model, tmp_path)

    assert accuracies[-1] >= accuracies[0] + 0.15


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", os.environ.get("SEEDS", "").split())
def test_held_out_accuracy_rises_by_sft_and_then_by_rl(seed: str, model: Path, tmp_path: Path) -> None:
    """Ten steps of SFT and twenty of RL, as in the README."""
    make_rows(tmp_path, seed=int(seed))
    rows = [f"data.train_files={tmp_path}/answered.jsonl", "data.train_batch_size=16", "data.max_length=128"]
    steps = ["optim.lr=1e-5", "trainer.total_training_steps=10", "trainer.save_freq=10"]
    _trackway(
        tmp_path, "train", "--config-name", "sft", f"model.path={model}", *rows, *steps, "trainer.experiment_name=sft"
    )
    _trackway(tmp_path, "export", "sft", str(tmp_path / "after-sft"))

    before = _held_out_accuracies(seed, model, tmp_path / "before", "trainer.total_training_steps=1")[0]
    after = _held_out_accuracies(seed, tmp_path / "after-sft", tmp_path / "after", "trainer.total_training_steps=20")

    assert before + 0.15 <= after[0] <= after[-1] - 0.05


def _held_out_accuracies(seed: str, model: Path, folder: Path, *keys: str) -> list[float]:
    """Train by RL and return the accuracy of each validation."""
    folder.mkdir(exist_ok=True)
    make_rows(folder, seed=int(seed))
    files = [f"data.train_files={folder}/train.jsonl", f"data.val_files={folder}/held_out.jsonl"]
    words = [*files, f"actor_rollout_ref.model.path={model}", f"trackway.seed={seed}", "trainer.experiment_name=run"]
    _trackway(folder, "train", "--config", str(EXAMPLE / "trackway.yaml"), *words, *keys)
    rows = RunFolder(folder / "run").rows()
    accuracies = [(row.step, value) for row in rows for key, value in row.data.items() if demo.is_accuracy(key)]
    print(f"seed {seed}, {model.name}: {accuracies}")
    return [value for _, value in accuracies]


def _trackway(outputs: Path, command: str, *words: str) -> None:
    start = [sys.executable, "-m", "trackway.deploy.cli", command, *words]
    subprocess.run([*start, "--outputs", str(outputs), "--json"], check=True, timeout=3600)
