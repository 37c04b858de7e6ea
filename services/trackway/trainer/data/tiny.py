"""One-step word problems, small enough for a 0.2M-parameter model with a calculator.

The split is by number pairs, not by questions: one unordered pair in five is held out, so no test problem uses a pair
that occurs in training. The checkpoint in `examples/tiny` was trained for these problems.
"""

import random
from dataclasses import dataclass
from typing import Literal
from zlib import crc32

from trackway.trainer.data.rows import ExtraInfo, Split, make_row
from trackway.wire.agent import Sample
from trackway.wire.chat import Message

DATA_SOURCE = "trackway/tiny_math"

Operation = Literal["+", "-", "*", "/"]
OPERATIONS: tuple[Operation, ...] = ("+", "-", "*", "/")

NAMES = (
    *("Tom", "Ann", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe"),
    *("Max", "Ivy", "Dan", "Amy", "Joe", "Kim", "Ray", "Sue"),
)
OBJECTS = ["apples", "books", "coins", "cards", "shells", "stamps", "pens", "eggs", "cakes", "toys"]
TEMPLATES: dict[Operation, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things}. {other} gives {name} {b} more {things}. How many {things} does {name} have now?",
        "{name} has {a} {things} and buys {b} more. How many {things} does {name} have in total?",
        "There are {a} {things} in one bag and {b} {things} in another bag. How many {things} are there altogether?",
        "{name} found {a} {things} on Monday and {b} {things} on Friday. How many {things} did {name} find in all?",
    ),
    "-": (
        "{name} has {a} {things}. {name} gives {b} {things} to {other}. How many {things} are left?",
        "{name} had {a} {things} and lost {b} of them. How many {things} does {name} still have?",
        "There were {a} {things} on the shelf. {name} took {b} away. How many {things} remain?",
        "{name} has {a} {things} and {other} has {b} {things}. How many more {things} does {name} have than {other}?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} in each box. How many {things} does {name} have?",
        "Each of {a} friends brings {b} {things}. How many {things} do they bring?",
        "{name} makes {a} {things} every day for {b} days. How many {things} does {name} make?",
        "{name} bought {a} {things} for {b} dollars each. How many dollars did {name} pay?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
        "{name} packs {a} {things} into boxes of {b}. How many boxes does {name} need?",
        "{a} {things} are split into {b} equal groups. How many {things} are in each group?",
        "{name} pays {a} dollars for {b} {things}. How many dollars does one cost?",
    ),
}


@dataclass(frozen=True)
class Problem:
    """A question, and the operation on two whole numbers that answers it."""

    question: str
    left: int
    operation: Operation
    right: int

    @property
    def expression(self) -> str:
        """The expression for the calculator."""
        return f"{self.left}{self.operation}{self.right}"

    @property
    def result(self) -> int:
        """The answer. Divisions have no remainder."""
        match self.operation:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right
            case "/":
                return self.left // self.right

    @property
    def answer(self) -> str:
        """The worked answer in GSM8K's form."""
        return f"{self.left} {self.operation} {self.right} = {self.result}\n#### {self.result}"


def is_held_out(left: int, right: int) -> bool:
    """Return whether a number pair belongs to the test split, in either order. About one pair in five does."""
    low, high = sorted((left, right))
    return crc32(f"{low},{high}".encode()) % 5 == 0


def draw_problem(rng: random.Random, split: Split) -> Problem:
    """A random problem of a split. The operation is drawn first, so both splits have the same mix of operations."""
    operation = rng.choice(OPERATIONS)
    left, right = _draw_pair(rng, operation)
    while is_held_out(left, right) != (split == "test"):
        left, right = _draw_pair(rng, operation)
    name, other = rng.sample(NAMES, 2)
    template = rng.choice(TEMPLATES[operation])
    question = template.format(name=name, other=other, things=rng.choice(OBJECTS), a=left, b=right)
    return Problem(question, left, operation, right)


def make_tiny_rows(split: Split, count: int, seed: int) -> list[Sample]:
    """`count` rows of a split, deterministic in the arguments. The index is the row's position."""
    rng = random.Random(f"{split}/{seed}")
    return [_to_row(draw_problem(rng, split), split, index) for index in range(count)]


def _draw_pair(rng: random.Random, operation: Operation) -> tuple[int, int]:
    if operation == "*":
        return rng.randint(2, 12), rng.randint(2, 12)
    if operation == "/":
        divisor = rng.randint(2, 12)
        return divisor * rng.randint(2, 12), divisor
    left, right = rng.randint(2, 40), rng.randint(2, 40)
    return (max(left, right), min(left, right)) if operation == "-" else (left, right)


def _to_row(problem: Problem, split: Split, index: int) -> Sample:
    return make_row(
        data_source=DATA_SOURCE,
        prompt=[Message(role="user", content=problem.question)],
        ground_truth=str(problem.result),
        extra_info=ExtraInfo(
            split=split,
            index=index,
            answer=problem.answer,
            question=problem.question,
            tool_selection=["calculator"],
        ),
    )
