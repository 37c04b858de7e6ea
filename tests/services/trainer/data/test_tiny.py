"""The tiny word problems."""

import random
import re

import pytest

from trackway.trainer.data.rows import Split
from trackway.trainer.data.tiny import (
    OPERATIONS,
    TEMPLATES,
    Operation,
    Problem,
    draw_problem,
    is_held_out,
    make_tiny_rows,
)


@pytest.mark.parametrize(
    ("operation", "result"),
    [("+", 15), ("-", 9), ("*", 36), ("/", 4)],
    ids=["add", "subtract", "multiply", "divide"],
)
def test_the_result_is_that_of_the_operation(operation: Operation, result: int) -> None:
    problem = Problem("?", 12, operation, 3)

    assert problem.result == result
    assert problem.expression == f"12{operation}3"
    assert problem.answer == f"12 {operation} 3 = {result}\n#### {result}"


def _pairs(split: Split) -> set[frozenset[int]]:
    rng = random.Random(1)
    return {frozenset((p.left, p.right)) for p in (draw_problem(rng, split) for _ in range(3000))}


def test_held_out_pairs_never_occur_in_training() -> None:
    train, test = _pairs("train"), _pairs("test")

    assert len(train) > 500
    assert len(test) > 100
    assert train.isdisjoint(test)


def test_one_pair_in_five_is_held_out_in_either_order() -> None:
    pairs = [(left, right) for left in range(2, 41) for right in range(2, left)]

    share = sum(is_held_out(*pair) for pair in pairs) / len(pairs)

    assert 0.17 < share < 0.23
    assert all(is_held_out(left, right) == is_held_out(right, left) for left, right in pairs)


@pytest.mark.parametrize("split", ["train", "test"])
def test_both_splits_mix_the_operations_alike(split: Split) -> None:
    rng = random.Random(3)

    drawn = [draw_problem(rng, split).operation for _ in range(2000)]

    assert all(0.2 < drawn.count(operation) / 2000 < 0.3 for operation in OPERATIONS)


def test_every_operation_has_four_templates_that_show_both_numbers() -> None:
    assert {operation: len(templates) for operation, templates in TEMPLATES.items()} == dict.fromkeys(OPERATIONS, 4)
    assert all("{a}" in text and "{b}" in text for templates in TEMPLATES.values() for text in templates)


def test_a_division_problem_has_a_whole_answer() -> None:
    rng = random.Random(4)

    problems = [p for p in (draw_problem(rng, "train") for _ in range(2000)) if p.operation == "/"]

    assert len(problems) > 300
    assert all(p.left % p.right == 0 and p.right >= 2 for p in problems)


def test_the_numbers_of_the_question_are_those_of_the_expression() -> None:
    rng = random.Random(5)

    problems = [draw_problem(rng, "test") for _ in range(500)]

    assert all(sorted(map(int, re.findall(r"\d+", p.question))) == sorted((p.left, p.right)) for p in problems)


def test_a_row_has_the_bare_question_as_prompt_and_its_result_as_ground_truth() -> None:
    row = make_tiny_rows("test", 3, seed=0)[2]

    question, answer = row.extra_info["question"], str(row.extra_info["answer"])
    assert [message.model_dump(exclude_none=True) for message in row.prompt] == [{"role": "user", "content": question}]
    assert (row.data_source, row.agent_name, row.ability) == ("trackway/tiny_math", "tool_agent", "math")
    assert answer.endswith(f"\n#### {row.reward_model.ground_truth}")
    assert row.extra_info["split"] == "test"
    assert (row.extra_info["need_tools_kwargs"], row.extra_info["tools_kwargs"]) == (False, {})
    assert row.extra_info["tool_selection"] == ["calculator"]


def test_the_index_is_unique_within_a_split() -> None:
    assert [row.index for row in make_tiny_rows("test", 50, seed=7)] == list(range(50))


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    first, again, reseeded = (make_tiny_rows("train", 20, seed) for seed in (7, 7, 8))

    assert first == again
    assert first != reseeded
