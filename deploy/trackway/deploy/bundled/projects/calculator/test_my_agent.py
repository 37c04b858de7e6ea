"""`pytest` runs these without a network: the parts alone, then one trajectory with the tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from reward import compute_score
from tool import calculator

from trackway.tools import ToolInputError

PROJECT = Path(__file__).parent


def test_the_tool_calculates() -> None:
    assert [calculator(text) for text in ("12-5", "12 + 5", "6*7", "84/7")] == ["7", "17", "42", "12"]


def test_the_tool_says_what_it_expects() -> None:
    with pytest.raises(ToolInputError, match="expected two whole numbers"):
        calculator("twelve minus five")


def test_the_reward_is_1_for_the_right_number_less_a_tenth_for_a_failed_call() -> None:
    calls = [{"error": None}, {"error": "tool_failed"}]

    assert compute_score("my_agent", "#### 7", "7")["score"] == 1.0
    assert compute_score("my_agent", "#### 8", "7")["score"] == 0.0
    assert compute_score("my_agent", "#### 7", "7", {"tool_calls": calls})["score"] == pytest.approx(0.9)


def test_a_trajectory_of_the_first_row_is_scored() -> None:
    command = [sys.executable, "-m", "trackway.deploy.cli", "try", "rows.jsonl", "--json"]
    tried = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False)

    assert tried.returncode == 0, tried.stderr
    [trajectory] = json.loads(tried.stdout)["trajectories"]
    assert trajectory["agent_name"] == "my_agent"
    assert trajectory["reward"]["score"] in (0.0, 0.9, 1.0)
