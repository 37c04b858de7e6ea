"""The reward function, with verl's signature; it scores as verl does for openai/gsm8k."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the last number after #### is the right one, else 0.0. `solution_str` is what the model wrote."""
    answers = re.findall(r"#### (-?[0-9.,]+)", solution_str)
    return float(bool(answers) and answers[-1].replace(",", "").rstrip(".") == ground_truth)
