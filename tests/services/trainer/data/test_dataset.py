import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import JsonValue

from trackway.run_config import compose, resolve
from trackway.trainer.data.dataset import (
    Position,
    Prompts,
    RowChoice,
    load_data,
    load_rows,
    prompts_of,
    steps_per_epoch,
    traced_positions,
)
from trackway.trainer.data.row_files import write_rows
from trackway.wire.agent import Sample
from trackway.wire.errors import TrackwayError

Make = Callable[[int], Sample]


ORDER_OF_42 = ([1, 2, 5, 7, 6, 0, 3, 4], [4, 0, 7, 1, 2, 6, 3, 5])


def indices(batch: list[Sample]) -> list[int | str]:
    return [row.index for row in batch]


def epoch(prompts: Prompts, number: int) -> list[int | str]:
    position = Position(epoch=number)
    seen: list[int | str] = []
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
    prompts, same, reshuffled = (Prompts(rows, 5, seed, shuffle=True) for seed in (1, 1, 2))

    assert epoch(prompts, 0) == epoch(same, 0)
    assert epoch(prompts, 0) != epoch(prompts, 1)
    assert epoch(prompts, 0) != epoch(reshuffled, 0)


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


def test_the_seeds_order_of_an_epoch_is_the_same_on_every_machine(sample: Make):
    prompts = Prompts([sample(index) for index in range(8)], batch_size=4, seed=42, shuffle=True)

    assert (epoch(prompts, 0), epoch(prompts, 1)) == (ORDER_OF_42[0], ORDER_OF_42[1])


def test_without_drop_last_the_rest_of_an_epoch_is_a_smaller_batch(sample: Make):
    prompts = Prompts([sample(index) for index in range(5)], 2, seed=1, shuffle=False, drop_last=False)
    position, batches = Position(), []
    for _ in range(4):
        batch, position = prompts.take(position)
        batches.append(indices(batch))

    assert prompts.steps_per_epoch == 3
    assert batches == [[0, 1], [2, 3], [4], [0, 1]]
    assert position == Position(epoch=1, batch=1)


def test_a_run_resumed_at_the_incomplete_batch_goes_on_as_if_nothing_had_happened(sample: Make):
    rows = [sample(index) for index in range(5)]
    whole = Prompts(rows, 2, seed=7, shuffle=True, drop_last=False)
    stored = Position(epoch=0, batch=2).model_dump_json()

    rest, after = Prompts(rows, 2, seed=7, shuffle=True, drop_last=False).take(Position.model_validate_json(stored))

    assert indices(rest) == epoch(whole, 0)[4:]
    assert after == Position(epoch=1)


def test_a_position_behind_the_last_batch_is_the_next_epoch(sample: Make):
    prompts = Prompts([sample(index) for index in range(4)], batch_size=2, seed=1, shuffle=False)

    batch, after = prompts.take(Position(epoch=3, batch=9))

    assert (indices(batch), after) == ([0, 1], Position(epoch=4, batch=1))


@pytest.mark.parametrize(
    ("rows", "drop_last", "steps"), [(7473, True, 29), (7473, False, 30), (512, False, 2), (3, False, 1)]
)
def test_steps_of_an_epoch(rows: int, drop_last: bool, steps: int):
    assert steps_per_epoch(rows, 256, drop_last) == steps


def test_no_rows_is_an_error_even_when_nothing_is_dropped():
    with pytest.raises(TrackwayError, match=r"expected rows to train on, got 0; check data\.train_files"):
        steps_per_epoch(0, 256, drop_last=False)


def test_fewer_rows_than_a_batch_is_an_error_that_says_so(sample: Make):
    with pytest.raises(TrackwayError, match=r"at least data.train_batch_size=4 rows, got 3"):
        Prompts([sample(index) for index in range(3)], batch_size=4, seed=1, shuffle=True)


def test_indices_that_repeat_over_files_are_replaced_by_positions(sample: Make, tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_rows(first, [sample(0), sample(1)])
    write_rows(second, [sample(0)])

    assert indices(load_rows([str(first)]).samples) == [0, 1]
    assert indices(load_rows([str(first), str(second)]).samples) == [0, 1, 2]


def test_columns_of_other_names_are_read_as_prompt_and_data_source(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"chat": [{"role": "user", "content": "1+1"}], "scorer": "mine", "data_source": "origin"}
    file.write_text(json.dumps({**row, "reward_model": {"ground_truth": "2"}}) + "\n")
    files: dict[str, JsonValue] = {"data.train_files": str(file), "data.val_files": str(file)}

    read = load_data(resolve({**files, "data.prompt_key": "chat", "data.reward_fn_key": "scorer"}))

    assert [(row.prompt[0].content, row.data_source) for rows in read for row in rows.samples] == [("1+1", "mine")] * 2
    assert resolve({}).data.columns == {}
    with pytest.raises(TrackwayError, match=r"expected the column talk \(data.prompt_key.* got chat, scorer"):
        load_rows([str(file)], columns={"prompt": "talk"})


def test_a_row_with_an_image_is_refused_instead_of_trained_without_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {
        "prompt": [{"role": "user", "content": "<image>"}],
        "data_source": "d",
        "reward_model": {"ground_truth": "2"},
    }
    file.write_text(json.dumps({**row, "images": []}) + "\n" + json.dumps({**row, "images": ["a.png"]}) + "\n")

    with pytest.raises(TrackwayError, match=r"rows.jsonl:2: expected rows of text, got images"):
        load_rows([str(file)])


@pytest.mark.parametrize(
    ("keys", "taken"),
    [
        ({"data.seed": 5}, [4, 0, 7, 5]),
        ({"trackway.seed": 5}, [4, 0, 7, 5]),
        ({"data.seed": 6}, [2, 4, 3, 8]),
        ({"data.shuffle": False}, [0, 1, 2, 3]),
        ({"trackway.max_samples": "first"}, [0, 1, 2, 3]),
    ],
)
def test_a_bounded_number_of_rows_is_drawn_as_in_verl(
    keys: dict[str, JsonValue], taken: list[int], sample: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    file = tmp_path / "rows.parquet"
    write_rows(file, [sample(index) for index in range(9)])
    files = {"data.train_files": str(file), "data.val_files": str(file)}

    with caplog.at_level(logging.INFO, "trackway.trainer"):
        train, held_out = load_data(resolve({**files, "data.train_max_samples": 4, "data.val_max_samples": 2, **keys}))

    assert indices(train.samples) == taken
    assert train.locations == [(str(file), index + 1) for index in taken]
    assert len(held_out.samples) == 2
    assert f"{file}: took 4 of 9 rows, " in caplog.messages[0]


@pytest.mark.parametrize(("choice", "most"), [("random", -1), ("random", 0), ("random", 9), ("first", -1)])
def test_without_a_bound_below_their_number_all_rows_are_taken_in_order(choice: str, most: int):
    config = resolve({"trackway.max_samples": choice})

    assert RowChoice.of(config, most).positions(9) == list(range(9))


@pytest.mark.parametrize(
    ("choice", "taken"), [(RowChoice(3), [1]), (RowChoice(3, seed=0), [5, 3]), (RowChoice(2, of_kept=True), [1, 3])]
)
def test_rows_are_chosen_before_those_that_do_not_fit_are_dropped_unless_asked_otherwise(
    choice: RowChoice, taken: list[int], sample: Make, tmp_path: Path
):
    file = tmp_path / "rows.parquet"
    write_rows(file, [sample(index) for index in range(6)])

    rows = load_rows([str(file)], choice, keep=lambda rows, name: [row for row in rows if row.index % 2 == 1])

    assert indices(rows.samples) == taken
    assert rows.locations == [(str(file), index + 1) for index in taken]


def test_rows_are_told_by_file_and_number_the_first_few_and_how_many_more(sample: Make, tmp_path: Path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.parquet"
    write_rows(first, [sample(index) for index in range(3)])
    write_rows(second, [sample(index) for index in range(9)])

    rows = load_rows([str(first), str(second)])

    assert rows.describe([1]) == f"{first} row 2"
    assert rows.describe([0, 2, 3, 5, 7, 9, 11]) == f"{first} rows 1, 3; {second} rows 1, 3, 5 and 2 more"


def write_data(folder: Path, sample: Make) -> list[str]:
    """Two files to train on, of 3 and 2 rows, and two of other rows to validate on: parquet and JSONL of each."""
    for name, first in (("train", 0), ("val", 10)):
        write_rows(folder / f"{name}.parquet", [sample(first + index) for index in range(3)])
        lines = [json.dumps(sample(first + index).model_dump(mode="json", exclude_none=True)) for index in (0, 7)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        f"data.train_files=[{folder}/train.parquet,{folder}/train.jsonl]",
        f"data.val_files=[{folder}/val.parquet,{folder}/val.jsonl]",
    ]


def test_several_files_of_either_format_are_one_dataset(sample: Make, tmp_path: Path):
    config = compose(
        [
            *write_data(tmp_path, sample),
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "data.shuffle=false",
            "data.drop_last=false",
            "data.return_raw_chat=true",
            "data.val_max_samples=4",
        ]
    )

    rows, held_out = load_data(config)
    prompts = prompts_of(config, rows.samples)
    fewer, _ = load_data(config.with_values({"data.train_max_samples": 3}))
    seeds = ({"data.seed": 5}, {"trackway.seed": 5}, {"trackway.seed": 6, "data.seed": 5}, {"trackway.seed": 6})
    shuffled = [
        epoch(prompts_of(config.with_values({"data.shuffle": True, **keys}), rows.samples), 0) for keys in seeds
    ]

    assert epoch(prompts, 0) == [0, 1, 2, 3, 4]
    assert shuffled[0] == shuffled[1] == shuffled[2] != shuffled[3]
    assert prompts.steps_per_epoch == 3
    assert (indices(fewer.samples), indices(held_out.samples)) == ([0, 1, 2], [0, 1, 2, 3])
    questions = [[row.prompt[0].content for row in part.samples] for part in (rows, held_out)]
    assert questions == [[f"question {row}" for row in part] for part in ((0, 1, 2, 0, 7), (10, 11, 12, 10))]


def test_rows_without_an_agent_name_are_one_warning(sample: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    mini = ["data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]

    with caplog.at_level(logging.WARNING):
        load_data(compose([*write_data(tmp_path, sample), *mini]))

    [record] = caplog.records
    assert record.getMessage().startswith("10 of 10 rows have no agent_name and run as single_turn_agent")


def test_the_run_seed_orders_the_rows_unless_the_data_have_their_own(sample: Make, tmp_path: Path):
    mini = ["data.train_batch_size=5", "actor_rollout_ref.actor.ppo_mini_batch_size=5"]
    files = write_data(tmp_path, sample)

    def order(*seeds: str) -> list[int | str]:
        config = compose([*files, *mini, *seeds])
        return epoch(prompts_of(config, load_data(config)[0].samples), 0)

    assert (
        order("trackway.seed=1", "data.seed=5") == order("trackway.seed=2", "data.seed=5") == order("trackway.seed=5")
    )
    assert order("trackway.seed=1") != order("trackway.seed=5")


def test_traced_prompts_are_chosen_by_seed_and_step_and_bounded_by_the_batch():
    assert traced_positions(1, 5, size=12, count=2) == traced_positions(1, 5, size=12, count=2)
    assert len({traced_positions(1, step, size=12, count=2) for step in range(20)}) > 10
    assert traced_positions(1, 5, size=3, count=9) == {0, 1, 2}
    assert traced_positions(1, 5, size=3, count=0) == frozenset()
