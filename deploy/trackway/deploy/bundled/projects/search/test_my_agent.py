"""`pytest` runs these without a network: the reward alone, then one trajectory with the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

from reward import compute_score

PROJECT = Path(__file__).parent


def test_the_last_answer_counts_but_for_case_and_articles() -> None:
    answers = [
        "<answer>the aldra</answer>",
        "<answer>x</answer><answer> Aldra. </answer>",
        "Aldra",
        "<answer>Tarn</answer>",
    ]

    assert [compute_score("my_agent", answer, "Aldra") for answer in answers] == [1.0, 1.0, 0.0, 0.0]


def test_a_trajectory_of_the_first_row_is_scored() -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "try", "rows.jsonl", "--json"]
    tried = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)

    assert tried.returncode == 0, tried.stderr
    [trajectory] = json.loads(tried.stdout)["trajectories"]
    assert trajectory["reward"]["score"] in (0.0, 1.0)
