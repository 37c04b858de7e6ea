"""Samples of a step as JSON lines, in the form of verl's `rollout_data_dir` and `validation_data_dir`.

    <folder>/<step>.jsonl    {"input", "output", "gts", "score", "step", each component of the reward, and
                              "turn_scores" where there are some}

The form follows `_dump_generations` in verl/trainer/ppo/ray_trainer.py.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trackway.system import atomic_write, writing
from trackway.wire.trajectory import Trajectory


@dataclass(frozen=True)
class Generations:
    """Writes the scored trajectories of a step. `input` and `output` are text without special tokens."""

    folder: Path
    decode: Callable[[Sequence[int]], str]
    ground_truths: Mapping[int | str, str]
    """Ground truths by the index of the row."""

    def write(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Replace the file of this step. Raises StorageError when it cannot be written."""
        lines = [json.dumps(self._record(step, scored), ensure_ascii=False) for scored in trajectories if scored.reward]
        with writing(self.folder, "samples of the steps"):
            self.folder.mkdir(parents=True, exist_ok=True)
        atomic_write(self.folder / f"{step}.jsonl", "".join(f"{line}\n" for line in lines), what="samples of a step")

    def _record(self, step: int, trajectory: Trajectory) -> dict[str, object]:
        reward = trajectory.reward
        return {
            **(reward.components if reward else {}),
            **({"turn_scores": reward.turn_scores} if reward and reward.turn_scores else {}),
            "input": self.decode(trajectory.prompt_ids),
            "output": self.decode(trajectory.response_ids),
            "gts": self.ground_truths.get(trajectory.tags.sample_index),
            "score": reward.score if reward else None,
            "step": step,
        }
