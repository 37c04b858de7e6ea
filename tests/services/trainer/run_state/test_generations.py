"""The samples of a step as JSON lines, in verl's form."""

import json
from collections.abc import Callable
from pathlib import Path

from trackway.trainer.run_state.trajectories import Generations
from trackway.wire.trajectory import Reward, Trajectory


def test_a_step_has_a_line_for_each_scored_sample_with_verls_fields(rollout: Callable[..., Trajectory], tmp_path: Path):
    samples = Generations(tmp_path / "samples", lambda ids: " ".join(map(str, ids)), {7: "42"})
    reward = Reward(score=0.5, components={"correct": 1.0})

    of_turns = Reward(score=1.0, turn_scores=[0.75])
    samples.write(3, [rollout(7, 0, reward=reward), rollout(7, 1, reward=None), rollout(8, 0, reward=of_turns)])

    lines = (tmp_path / "samples" / "3.jsonl").read_text().splitlines()
    text = {"input": "10 11 12", "output": "20 21 30 31 22 23", "step": 3}
    assert [json.loads(line) for line in lines] == [
        {**text, "gts": "42", "score": 0.5, "correct": 1.0},
        {**text, "gts": None, "score": 1.0, "turn_scores": [0.75]},
    ]
