"""The reward function, with verl's signature."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1.0 for the right number after ####, else 0.0; each tool call that failed costs 0.1.

    `solution_str` is what the model wrote, without the tools' results. `acc` is reported as the accuracy.
    """
    answers = re.findall(r"####\s*(-?[\d.,]*\d)", solution_str)
    correct = bool(answers) and answers[-1].replace(",", "") == ground_truth
    calls = (extra_info or {}).get("tool_calls", [])
    failed = sum(call["error"] is not None for call in calls)
    return {"score": correct - 0.1 * failed, "acc": float(correct), "failed_calls": float(failed)}
