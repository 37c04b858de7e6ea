"""The learner's micro-batches packed into one row against padded ones: seconds and CPU seconds, side by side.

    .venv/bin/python benchmarks/learner.py [--quick]

A random Qwen3 of 5.0 million parameters, float32, one thread; 24 trajectories in micro-batches of 8, which the learner
sorts by length. "whole row" is the packed row with the mask that transformers makes of its positions, in place of
attention by sequence. The contenders take turns; each cell shows the best round of each, since other work on the
machine only ever makes a round slower, and its ratio to padded rows.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from engine_contenders import VOCABULARY, random_model
from pydantic import JsonValue

from trackway.trainer.config import resolve
from trackway.trainer.learner.batch import TrainingBatch
from trackway.trainer.learner.learner import Learner
from trackway.trainer.learner.packing import PackedRow
from trackway.trainer.learner.policy import Policy
from trackway.trainer.learner.ranks.balance import PassLimit, rounds_of
from trackway.trainer.loop.from_config import learner_config
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory

COUNT, MICRO_BATCH, ROLLOUTS = 24, 8, 8
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "equal": lambda draw: 192,
    "ragged": lambda draw: draw.randint(32, 352),
    "long tail": lambda draw: min(700, int(draw.lognormvariate(4.7, 0.8)) + 16),
}
"""Response tokens, of about the same mean."""


class WholeRow(Policy):
    """A packed row under one mask, as transformers makes it of positions that start again."""

    def logits(self, batch: TrainingBatch, temperature: float) -> torch.Tensor:
        """As the base's."""
        row = PackedRow.of(batch)
        inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids}
        return self._forward(row.response_mask, inputs) / temperature


class Cost(NamedTuple):
    """Of one pass over the trajectories."""

    wall_s: float
    cpu_s: float


def trajectories(name: str) -> list[Trajectory]:
    """Groups of a prompt each, half of the response's tokens by the model."""
    draw = random.Random(name)
    made = []
    for row in range(COUNT):
        size = LENGTHS[name](draw)
        prompt = [(7 * position + row // ROLLOUTS) % VOCABULARY for position in range(64)]
        mask = [int(place % 64 < 32) for place in range(size)]
        made.append(
            Trajectory(
                id=f"r/1/{row}",
                session_id="s",
                tags=Tags(experiment_name="e", step=1, sample_index=row // ROLLOUTS, rollout_n=row % ROLLOUTS),
                agent_name="a",
                data_source="d",
                prompt_ids=prompt,
                response_ids=[draw.randrange(VOCABULARY) for _ in range(size)],
                response_mask=mask,
                response_logprobs=[-7.0 * bit for bit in mask],
                reward=Reward(score=float(row % 2)),
                stop_reason=StopReason.ANSWERED,
            )
        )
    return made


def cost(work: Callable[[], object]) -> Cost:
    """What a call took."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def learners(folder: Path) -> dict[str, Learner]:
    """Equal learners that compute the same batches in different ways."""
    keys: dict[str, JsonValue] = {
        "actor_rollout_ref.model.path": str(folder),
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": MICRO_BATCH,
        "algorithm.rollout_correction.bypass_mode": True,
        "trackway.device": "cpu",
    }
    config = learner_config(resolve(keys), total_steps=1)
    whole = Learner(config)
    whole.policy = WholeRow(str(folder))
    whole.optimizer = torch.optim.AdamW(whole.policy.model.parameters(), lr=config.actor.optim.lr)
    return {
        "padded": Learner(config),
        "packed": Learner(replace(config, model=config.model.model_copy(update={"use_remove_padding": True}))),
        "whole row": whole,
    }


def row(passes: dict[str, Callable[[], object]], rounds: int) -> str:
    """One row of the table."""
    costs: dict[str, list[Cost]] = {name: [] for name in passes}
    for _ in range(rounds):
        for name, work in passes.items():
            costs[name].append(cost(work))
    best = {name: Cost(min(c.wall_s for c in each), min(c.cpu_s for c in each)) for name, each in costs.items()}
    padded = best["padded"]
    return " | ".join(
        f"{cost.wall_s:5.2f} {cost.cpu_s:5.2f} ({cost.wall_s / padded.wall_s:4.2f}x {cost.cpu_s / padded.cpu_s:4.2f}x)"
        for cost in best.values()
    )


def padding(batch: list[Trajectory]) -> float:
    """The share of computed positions that are padding, in micro-batches of similar length."""
    made = TrainingBatch.of(batch, [0.0] * len(batch))
    passes = [rows for rounds in rounds_of(made.lengths.tolist(), PassLimit(MICRO_BATCH)) for rows in rounds]
    computed = sum(made.rows(torch.tensor(rows)).input_ids.numel() for rows in passes)
    return 1 - int(made.lengths.sum()) / computed


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of two")
    rounds = 1 if parser.parse_args().quick else 2
    with tempfile.TemporaryDirectory() as name:
        random_model(Path(name))
        contenders = learners(Path(name))
        print("seconds: wall CPU      | padded                    | packed                    | whole row")
        for lengths in LENGTHS:
            batch = trajectories(lengths)
            print(f"{lengths}: {padding(batch):.0%} padding")
            passes = {"log-probs": Learner.log_probs, "update": Learner.update}
            for what, work in passes.items():
                turns = {name: partial(work, contender, batch) for name, contender in contenders.items()}
                print(f"{what:22} | {row(turns, rounds)}", flush=True)


if __name__ == "__main__":
    main()
