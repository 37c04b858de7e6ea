"""The reward function, with verl's signature."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 when the last <answer>...</answer> is the right one but for case, articles and punctuation, else 0.0."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    return float(bool(answers) and _normalized(answers[-1]) == _normalized(ground_truth))


def _normalized(text: str) -> str:
    words = re.sub(r"[^\w\s]", "", text.lower()).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))
