from collections.abc import Callable

import pytest

from trackway.trainer.data.parquet import write_rows
from trackway.trainer.dataset import Position, Prompts, load_samples, traced_positions
from trackway.wire.agent import Sample
from trackway.wire.errors import TrackwayError

Make = Callable[[int], Sample]


def indices(batch: list[Sample]) -> list[int]:
    return [row.index for row in batch]


def epoch(prompts: Prompts, number: int) -> list[int]:
    position = Position(epoch=number)
    seen: list[int] = []
    while position.epoch == number:
        batch, position = prompts.take(position)
        seen += indices(batch)
    return seen


def test_an_epoch_gives_whole_batches_without_repeating_a_row(sample: Make):
    prompts = Prompts([sample(index) for index in range(10)], batch_size=3, seed=1, shuffle=True)

    seen = epoch(prompts, 0)

    assert prompts.steps_per_epoch == 3
    assert len(seen) == len(set(seen)) == 9


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides(sample: Make):
    rows = [sample(index) for index in range(20)]
    one, same, other = (Prompts(rows, 5, seed, shuffle=True) for seed in (1, 1, 2))

    assert epoch(one, 0) == epoch(same, 0)
    assert epoch(one, 0) != epoch(one, 1)
    assert epoch(one, 0) != epoch(other, 0)


def test_without_shuffle_rows_come_in_file_order_and_the_rest_is_dropped(sample: Make):
    prompts = Prompts([sample(index) for index in range(5)], batch_size=2, seed=1, shuffle=False)

    batch, after = prompts.take(Position())
    rest, next_epoch = prompts.take(after)

    assert (indices(batch), indices(rest)) == ([0, 1], [2, 3])
    assert next_epoch == Position(epoch=1, batch=0)


def test_a_position_gives_the_same_batch_whenever_it_is_asked(sample: Make):
    rows = [sample(index) for index in range(12)]
    _, position = Prompts(rows, 4, seed=7, shuffle=True).take(Position())
    stored = Position.model_validate_json(position.model_dump_json())

    resumed = Prompts(rows, 4, seed=7, shuffle=True).take(stored)

    assert resumed == Prompts(rows, 4, seed=7, shuffle=True).take(position)


def test_fewer_rows_than_a_batch_is_an_error_that_says_so(sample: Make):
    with pytest.raises(TrackwayError, match=r"at least data.train_batch_size=4 rows, got 3"):
        Prompts([sample(index) for index in range(3)], batch_size=4, seed=1, shuffle=True)


def test_indices_that_repeat_over_files_are_replaced_by_positions(sample: Make, tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_rows(first, [sample(0), sample(1)])
    write_rows(second, [sample(0)])

    assert indices(load_samples([str(first)])) == [0, 1]
    assert indices(load_samples([str(first), str(second)])) == [0, 1, 2]


def test_rows_that_do_not_fit_are_dropped_before_the_count_is_bounded(sample: Make, tmp_path):
    file = tmp_path / "rows.parquet"
    write_rows(file, [sample(index) for index in range(6)])

    rows = load_samples([str(file)], max_samples=2, fits=lambda row: row.index % 2 == 1)

    assert indices(rows) == [1, 3]


def test_traced_prompts_are_chosen_by_seed_and_step_and_bounded_by_the_batch():
    assert traced_positions(1, 5, size=12, count=2) == traced_positions(1, 5, size=12, count=2)
    assert len({traced_positions(1, step, size=12, count=2) for step in range(20)}) > 10
    assert traced_positions(1, 5, size=3, count=9) == {0, 1, 2}
    assert traced_positions(1, 5, size=3, count=0) == frozenset()
