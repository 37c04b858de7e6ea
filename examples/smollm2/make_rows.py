"""Writes the rows of the task, in verl's schema: a number from 21 to 999 in words, to be written in digits.

    python examples/smollm2/make_rows.py            # train.jsonl, held_out.jsonl and answered.jsonl beside this file

One number in five is held out: no row of the training has it. Each prompt shows two numbers that are in neither file,
so that the form of the answer is known and what has to be learned is to read the words.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any
from zlib import crc32

from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message

FOLDER = Path(__file__).parent
DATA_SOURCE = "trackway/number_words"
TRAIN_ROWS, HELD_OUT_ROWS = 1000, 128
SYSTEM = "Write the number in digits."
EXAMPLES = (647, 52)
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below 1000, such as `six hundred forty-seven`."""
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    below = _ONES[rest] if rest < 20 else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if not hundreds:
        return below
    return f"{_ONES[hundreds]} hundred {below}" if rest else f"{_ONES[hundreds]} hundred"


def is_held_out(number: int) -> bool:
    """Whether a number is for validation only; about one in five is."""
    return crc32(str(number).encode()) % 5 == 0


def problem(number: int, split: str, index: int) -> Sample:
    """The row of a number."""
    prompt = [Message(role="system", content=SYSTEM)]
    for example in EXAMPLES:
        prompt.append(Message(role="user", content=in_words(example)))
        prompt.append(Message(role="assistant", content=str(example)))
    prompt.append(Message(role="user", content=in_words(number)))
    return Sample(
        data_source=DATA_SOURCE,
        agent_name="single_turn_agent",
        prompt=prompt,
        ability="reading",
        reward_model=RewardModel(style="rule", ground_truth=str(number)),
        extra_info={"split": split, "index": index},
    )


def problems(split: str, count: int, seed: int) -> list[Sample]:
    """`count` rows of `train` or `held_out`, deterministic in the arguments; each number occurs as evenly as it can."""
    numbers = [n for n in range(21, 1000) if is_held_out(n) == (split == "held_out") and n not in EXAMPLES]
    rng, drawn = random.Random(f"{split}/{seed}"), list[int]()
    while len(drawn) < count:
        drawn += rng.sample(numbers, min(len(numbers), count - len(drawn)))
    return [problem(number, split, index) for index, number in enumerate(drawn)]


def make_rows(folder: Path, seed: int) -> None:
    """Writes both files, and the training rows with their answers for supervised training."""
    for split, count in (("train", TRAIN_ROWS), ("held_out", HELD_OUT_ROWS)):
        rows = [row.model_dump(mode="json", exclude_none=True) for row in problems(split, count, seed)]
        _write(folder / f"{split}.jsonl", rows)
        if split == "train":
            _write(folder / "answered.jsonl", [{"messages": _answered(row)} for row in rows])


def _answered(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [*row["prompt"], {"role": "assistant", "content": row["reward_model"]["ground_truth"]}]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def main() -> None:
    """Write the rows of a seed."""
    parser = argparse.ArgumentParser(description="Write number words in verl's row schema.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the files")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make_rows(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
