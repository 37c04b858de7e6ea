"""Write the tiny model before any teaching, and conversations to teach it with `trackway train --config-name sft`.

python examples/tiny/untrained.py outputs/untrained
"""

import argparse
import json
import random
from pathlib import Path

import torch
from build import OTHER_TOOLS, new_model, save, train_tokenizer

from trackway.trainer.data.rows import Split
from trackway.trainer.data.tiny import Problem, draw_problem


def conversation(problem: Problem, tools: list[str]) -> dict[str, object]:
    """A row of supervised training: the question, the call of the calculator, its result, the answer."""
    call = {"name": "calculator", "arguments": json.dumps({"expression": problem.expression})}
    messages = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": str(problem.result)},
        {"role": "assistant", "content": f"#### {problem.result}"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": name}} for name in tools]}


def conversations(count: int, split: Split, seed: int) -> list[dict[str, object]]:
    """So many rows; one in four lists further tools, so that their names do not disturb later."""
    drawn, rows = random.Random(seed), []
    for _ in range(count):
        problem, tools = draw_problem(drawn, split), ["calculator"]
        if drawn.random() < 0.25:
            tools += drawn.sample(OTHER_TOOLS, drawn.randint(1, len(OTHER_TOOLS)))
            drawn.shuffle(tools)
        rows.append(conversation(problem, tools))
    return rows


def main() -> None:
    """Write the model and the rows."""
    parser = argparse.ArgumentParser(description="Write the untrained tiny model and rows to teach it with.")
    parser.add_argument("out", type=Path, help="folder to write: model/, train.jsonl, held_out.jsonl")
    parser.add_argument("--rows", type=int, default=24_000, help="conversations to train on")
    options = parser.parse_args()
    torch.manual_seed(0)
    save(new_model(), train_tokenizer(), options.out / "model")
    for name, rows in (
        ("train", conversations(options.rows, "train", seed=1)),
        ("held_out", conversations(256, "test", seed=1)),
    ):
        (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
