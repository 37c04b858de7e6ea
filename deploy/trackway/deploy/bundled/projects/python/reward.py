"""The reward function, with verl's signature."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1.0 when the last number after #### is the right one, else 0.0; `calls` counts the calls of python.

    `solution_str` is what the model wrote, without the tools' results. `acc` is reported as the accuracy.
    """
    answers = re.findall(r"####\s*(-?[\d.,]*\d)", solution_str)
    correct = float(bool(answers) and answers[-1].replace(",", "") == ground_truth)
    calls = (extra_info or {}).get("tool_calls", [])
    return {"score": correct, "acc": correct, "calls": float(len(calls))}
