"""Conversations of the tiny model's task, as rows of supervised training."""

import json
import random
from pathlib import Path

from trackway.trainer.data.rows import Split
from trackway.trainer.data.tiny import Problem, draw_problem

TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def conversation(problem: Problem) -> dict[str, object]:
    """A row: the question, the call of the calculator, its result, the answer."""
    call = {"name": "calculator", "arguments": {"expression": problem.expression}}
    messages = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(problem.result)},
        {"role": "assistant", "content": f"#### {problem.result}"},
    ]
    return {"messages": messages, "tools": TOOLS}


def write_conversations(path: Path, count: int, split: Split = "train", seed: int = 0) -> Path:
    """Write so many rows of a split to a JSONL file, and return it."""
    drawn = random.Random(seed)
    rows = [conversation(draw_problem(drawn, split)) for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
