"""Two versions that a learner really made, and folders of what an engine may hold in place of the second."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory
from trackway.wire.weights import WeightProof

DEMO, USUAL = 3e-4, 1e-6
"""Learning rates: of the demo, and the one that RL on large models has."""
LEFT_OUT = "model.layers.1.self_attn.q_proj.weight"
SWAPPED = ("model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight")
Tensors = dict[str, Tensor]
Pairs = Sequence[tuple[list[int], list[int]]]
"""Prompts and continuations, four of each prompt."""


class Versions(NamedTuple):
    """Version 2 of a run, what was published with it, and folders of what an engine may hold in its place."""

    before: WeightProof
    """The proof of version 1, in the folder "old kept"."""
    proof: WeightProof
    folders: dict[str, Path]


def batch(pairs: Pairs, good: int) -> list[Trajectory]:
    """All rollouts with a reward for those whose number has a bit in common with `good`."""
    return [
        Trajectory(
            id=str(n),
            session_id="s",
            tags=Tags(experiment_name="e", step=1, sample_index=n // 4, rollout_n=n % 4),
            agent_name="a",
            data_source="d",
            prompt_ids=prompt,
            response_ids=response,
            response_mask=[1] * len(response),
            response_logprobs=[0.0] * len(response),
            reward=Reward(score=float(bool(n & good))),
            num_turns=1,
            stop_reason=StopReason.ANSWERED,
        )
        for n, (prompt, response) in enumerate(pairs)
    ]


def learner_of(model: Path, dtype: str, lr: float, device: str = "cpu") -> Learner:
    """Of a run from its beginning."""
    return Learner(learner_config(model, dtype=dtype, lr=lr, bypass_mode=False, device=device))


def planted(base: Path, folder: Path, change: Callable[[Tensors], object]) -> Path:
    """The base's weights after `change`."""
    shutil.copytree(base, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def swap(tensors: Tensors) -> None:
    """Two that no shape tells apart."""
    first, second = SWAPPED
    tensors[first], tensors[second] = tensors[second].clone(), tensors[first].clone()


def make_versions(model: Path, pairs: Pairs, root: Path, dtype: str, lr: float, device: str = "cpu") -> Versions:
    """Of a run that begins at the model and trains on these pairs, in its type and with its learning rate."""
    run, another_run = (learner_of(model, dtype, lr, device) for _ in range(2))
    run.update(batch(pairs, good=1))
    run.export(root / "1")
    before = run.proof(root / "1", None)
    run.update(batch(pairs, good=1))
    run.export(root / "2")
    for _ in range(2):
        another_run.update(batch(pairs, good=2))
    another_run.export(root / "another run")
    old = load_file(root / "1" / "model.safetensors")
    folders = {
        "right": root / "2",
        "old kept": root / "1",
        "one left out": planted(root / "2", root / "left", lambda new: new.update({LEFT_OUT: old[LEFT_OUT]})),
        "two swapped": planted(root / "2", root / "swapped", swap),
        "another run": root / "another run",
    }
    return Versions(before, run.proof(root / "2", 1), folders)
