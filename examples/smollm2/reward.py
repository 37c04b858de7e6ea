"""The reward: 1 for exactly the number in digits. `in_form` tells answers in digits, right or wrong, from others."""

import re
from typing import Any

END = "<|im_end|>"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """The score, which is also `acc`, and whether the answer is a number in digits at all."""
    answer = solution_str.removesuffix(END).strip()
    correct = float(answer == ground_truth)
    return {"score": correct, "acc": correct, "in_form": float(re.fullmatch(r"\d+", answer) is not None)}
