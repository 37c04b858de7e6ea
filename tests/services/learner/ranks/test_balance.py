"""Plans of passes: which rows each rank computes in which round."""

import random

import pytest

from trackway.learner.ranks.balance import PassLimit, balanced, rounds_of

LENGTHS = [4, 2, 3, 2]


def tokens(lengths: list[int], rows: list[int]) -> int:
    return sum(lengths[row] for row in rows)


def draw(seed: int, count: int = 40) -> list[int]:
    return [random.Random(seed * 100 + row).randint(1, 60) for row in range(count)]


def test_one_rank_has_rows_of_like_length_and_keeps_the_order_of_equal_ones():
    assert rounds_of(LENGTHS, PassLimit(2)) == [[[1, 3]], [[2, 0]]]
    assert rounds_of(LENGTHS, PassLimit(3)) == [[[1, 3, 2]], [[0]]]
    assert rounds_of(LENGTHS, PassLimit()) == [[[1, 3, 2, 0]]]
    assert rounds_of([5] * 200, PassLimit()) == [[list(range(200))]]


def test_the_longest_row_goes_first_and_each_to_the_part_with_the_fewest_tokens():
    assert balanced([7, 6, 5, 4, 3], 2) == [[0, 3, 4], [1, 2]]
    assert balanced([9, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert balanced([9, 1, 1, 1], 2, most_rows=2) == [[0, 3], [1, 2]]
    assert balanced([2], 3) == [[0], [], []]


def test_two_ranks_have_about_as_many_tokens_in_each_round():
    assert rounds_of([1, 2, 3, 4, 10, 20, 30, 40], PassLimit(2), 2) == [[[0, 3], [1, 2]], [[4, 7], [5, 6]]]


def test_a_rank_without_a_row_takes_part_in_the_round():
    assert rounds_of([5, 6, 7], PassLimit(1), 2) == [[[1], [0]], [[2], []]]
    assert rounds_of([5], PassLimit(tokens=8), 4) == [[[], [], [], [0]]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "limit", [PassLimit(), PassLimit(1), PassLimit(7), PassLimit(tokens=64), PassLimit(tokens=300)]
)
@pytest.mark.parametrize("has_padding", [False, True])
def test_every_row_is_in_one_micro_batch_within_the_limit_and_ranks_have_equal_numbers(
    ranks: int, limit: PassLimit, has_padding: bool
):
    for seed in range(20):
        lengths = draw(seed)

        rounds = rounds_of(lengths, limit, ranks, has_padding=has_padding)

        assert {len(micro_batches) for micro_batches in rounds} == {ranks}
        every = [rows for micro_batches in rounds for rows in micro_batches]
        assert sorted(row for rows in every for row in rows) == list(range(len(lengths)))
        for rows in every:
            if limit.tokens is None:
                assert len(rows) <= (limit.rows or -(-len(lengths) // ranks))
            elif has_padding:
                assert len(rows) * max((lengths[row] for row in rows), default=0) <= limit.tokens
            else:
                assert tokens(lengths, rows) <= limit.tokens


def test_a_row_beyond_the_limit_is_computed_alone():
    for has_padding in (False, True):
        rounds = rounds_of([3, 50, 4, 2], PassLimit(tokens=10), has_padding=has_padding)
        assert [1] in [rows for micro_batches in rounds for rows in micro_batches]


def test_a_limit_by_tokens_takes_as_few_passes_as_their_sum_allows():
    assert len(rounds_of([10] * 32, PassLimit(tokens=80))) == 4
    assert len(rounds_of([10] * 32, PassLimit(tokens=80), 2)) == 2
    assert len(rounds_of([10] * 32, PassLimit(tokens=80), 3)) == 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_ranks_of_a_round_wait_for_each_other_little(ranks: int):
    lengths = draw(7, count=200)

    for limit in (PassLimit(8), PassLimit(tokens=400)):
        rounds = rounds_of(lengths, limit, ranks)
        slowest = sum(max(tokens(lengths, rows) for rows in micro_batches) for micro_batches in rounds)
        assert slowest <= 1.05 * sum(lengths) / ranks


def test_rows_in_ranks_as_they_come_would_wait_longer():
    lengths = draw(7, count=200)

    in_order = sum(max(sum(lengths[i : i + 8]), sum(lengths[i + 8 : i + 16])) for i in range(0, 200, 16))

    assert in_order > 1.1 * sum(lengths) / 2
