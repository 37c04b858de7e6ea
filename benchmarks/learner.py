"""The learner's micro-batches packed into one row against padded ones: seconds and CPU seconds, side by side.

    .venv/bin/python benchmarks/learner.py [--quick]
    .venv/bin/python benchmarks/learner.py --memory    # ranks, logits in chunks, checkpoints: seconds and peak memory

A random Qwen3 of 5.0 million parameters, float32, one thread; 24 trajectories in micro-batches of 8, which the learner
sorts by length. "whole row" is the packed row with the mask that transformers makes of its positions, in place of
attention by sequence. The contenders take turns; each cell shows the best round of each, since other work on the
machine only ever makes a round slower, and its ratio to padded rows.

`--memory` trains a random Qwen3 of 54 million parameters with a vocabulary of 49,152 on 12 trajectories of 256 tokens
in one pass, each contender in processes of its own with one thread each. Peaks are of resident memory, less what a rank
has before it loads the model; that of loading includes one forward pass of one token. A snapshot is the copy that an
asynchronous checkpoint makes while training waits; its write goes on beside training.
"""

import argparse
import json
import os
import random
import subprocess
import sys
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
from transformers import Qwen3Config, Qwen3ForCausalLM

from trackway.learner.batch import TrainingBatch
from trackway.learner.config import PolicySettings
from trackway.learner.learner import Learner
from trackway.learner.packing import PackedRow
from trackway.learner.policy import ModelInputs, Policy
from trackway.learner.ranks.balance import PassLimit, rounds_of
from trackway.learner.ranks.group import LeadingLearner, RankGroup
from trackway.run_config import resolve
from trackway.run_config.placement import Placement
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

    def model_inputs(self, batch: TrainingBatch) -> ModelInputs:
        """As the base's."""
        row = PackedRow.of(batch)
        keywords = {"input_ids": row.input_ids, "position_ids": row.position_ids}
        return ModelInputs(keywords, row.response_mask, row.target_ids[row.response_mask])


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
        made.append(trajectory(row, prompt, [draw.randrange(VOCABULARY) for _ in range(size)], mask))
    return made


def trajectory(row: int, prompt: list[int], response: list[int], mask: list[int]) -> Trajectory:
    """One that every second of its group is better than."""
    return Trajectory(
        id=f"r/1/{row}",
        session_id="s",
        tags=Tags(experiment_name="e", step=1, sample_index=row // ROLLOUTS, rollout_n=row % ROLLOUTS),
        agent_name="a",
        data_source="d",
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[-7.0 * bit for bit in mask],
        reward=Reward(score=float(row % 2)),
        stop_reason=StopReason.ANSWERED,
    )


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
    whole.policy = WholeRow(PolicySettings(str(folder)))
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


LARGE = {"vocab_size": 49_152, "hidden_size": 512, "num_hidden_layers": 10, "intermediate_size": 1408}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True}
FSDP = "actor_rollout_ref.actor.fsdp_config"
BFLOAT16: dict[str, JsonValue] = {"trackway.dtype": "bfloat16"}
CONTENDERS: dict[str, tuple[int, dict[str, JsonValue]]] = {
    "1 rank, whole logits": (1, {"actor_rollout_ref.model.use_fused_kernels": False}),
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "2 ranks, rows divided": (2, {"actor_rollout_ref.actor.ulysses_sequence_parallel_size": 2}),
    "4 ranks": (4, {}),
    "2 ranks, bfloat16 gathered in float32": (2, BFLOAT16 | {f"{FSDP}.mixed_precision.param_dtype": "fp32"}),
    "2 ranks, bfloat16": (2, BFLOAT16),
}


class Measured(NamedTuple):
    """Of one contender: loading, the second update, checkpoints, and the memory of each rank."""

    load_s: float
    update_s: float
    save_s: float
    snapshot_s: float
    write_s: float
    load_peaks_mb: list[float]
    update_peaks_mb: list[float]
    save_peaks_mb: list[float]


def peak_mb(pid: int) -> float:
    """Peak of the resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def forget_peak(pid: int) -> None:
    """Starts the peak again at the present memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(folder: Path, name: str) -> Measured:
    """Runs one contender in this process, and its other ranks in theirs."""
    count, changed = CONTENDERS[name]
    keys: dict[str, JsonValue] = {
        "actor_rollout_ref.model.path": str(folder),
        "algorithm.rollout_correction.bypass_mode": True,
        "trackway.device": "cpu",
        "trackway.threads": 1,
        **changed,
    }
    config = learner_config(resolve(keys), total_steps=1)
    draw = random.Random(0)
    tokens = [[draw.randrange(49_152) for _ in range(256)] for _ in range(12)]
    batch = [trajectory(row, ids[:16], ids[16:], [1] * 240) for row, ids in enumerate(tokens)]
    group = RankGroup(config, Placement(count), 600.0) if count > 1 else None
    processes = [os.getpid(), *(group.pids if group else ())]
    for pid in processes:
        forget_peak(pid)
    before = [peak_mb(pid) for pid in processes]
    start = time.perf_counter()
    learner = LeadingLearner(config, group) if group else Learner(config)
    load_s = time.perf_counter() - start
    load_peaks = [peak_mb(pid) for pid in processes]
    try:
        learner.update(batch)
        for pid in processes:
            forget_peak(pid)
        update = cost(lambda: learner.update(batch))
        update_peaks = [peak_mb(pid) for pid in processes]
        for pid in processes:
            forget_peak(pid)
        save = cost(lambda: learner.save(folder / "checkpoint"))
        save_peaks = [peak_mb(pid) for pid in processes]
        start = time.perf_counter()
        snapshot = learner.snapshot()
        snapshot_s = time.perf_counter() - start
        write = cost(lambda: snapshot.write(folder / "asynchronous"))
        snapshot.close()
    finally:
        learner.close()
    of_each = (load_peaks, update_peaks, save_peaks)
    peaks = [[peak - own for peak, own in zip(of, before, strict=True)] for of in of_each]
    return Measured(load_s, update.wall_s, save.wall_s, snapshot_s, write.wall_s, *peaks)


def print_memory() -> None:
    """Print a row for each contender."""
    peaks = "peak MB of each rank"
    print(f"{'':37} | load s | {peaks} | update s | {peaks} | save s | {peaks} | snapshot s | its write s")
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**LARGE, **HEADS)).save_pretrained(name)
        (Path(name) / "tokenizer_config.json").write_text("{}")
        for contender in CONTENDERS:
            command = [sys.executable, __file__, "--contender", contender, "--folder", name]
            last_line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            made = Measured(**json.loads(last_line))
            of_each = (made.load_peaks_mb, made.update_peaks_mb, made.save_peaks_mb)
            load, update, save = (" ".join(f"{mb:.0f}" for mb in mbs).ljust(len(peaks)) for mbs in of_each)
            times = f"{made.save_s:6.1f} | {save} | {made.snapshot_s:10.2f} | {made.write_s:11.1f}"
            print(
                f"{contender:37} | {made.load_s:6.1f} | {load} | {made.update_s:8.1f} | {update} | {times}", flush=True
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round instead of two")
    parser.add_argument("--memory", action="store_true", help="peak memory of each rank instead")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(measure(options.folder, options.contender)._asdict()))
        return
    if options.memory:
        print_memory()
        return
    rounds = 1 if options.quick else 2
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
