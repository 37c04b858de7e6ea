"""Keys and rows of a Python call."""

import json
import math
from pathlib import Path

import pandas
import pytest
from hypothesis import given as drawn
from hypothesis import strategies

from trackway.deploy.api.given import overrides, row_files
from trackway.run_config.compose import given
from trackway.trainer.data.row_files import read_rows
from trackway.wire.errors import TrackwayError

NAMES = strategies.from_regex(r"[a-z]{1,5}", fullmatch=True)
SCALARS = (
    strategies.none()
    | strategies.booleans()
    | strategies.integers(-(10**9), 10**9)
    | strategies.floats(allow_nan=False, allow_infinity=False)
    | strategies.text(strategies.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))
)
KEY = "custom_reward_function.reward_kwargs"


@drawn(strategies.dictionaries(NAMES, SCALARS | strategies.lists(SCALARS), max_size=4))
def test_each_value_is_what_a_command_line_reads(values: dict[str, object]):
    assert given(overrides({KEY: values})) == {f"{KEY}.{name}": value for name, value in values.items()}


def test_sections_are_nested_dicts_or_dotted_names():
    nested = overrides({"trainer": {"save_freq": 5}, "data.train_batch_size": 2})

    assert nested == ["trainer.save_freq=5", "data.train_batch_size=2"]


def test_rows_are_prompts_and_answers_or_verls_columns(tmp_path: Path):
    full = {"data_source": "s", "prompt": [{"role": "user", "content": "b"}], "reward_model": {"ground_truth": "2"}}

    [file] = row_files([{"prompt": "a", "answer": 1}, full], tmp_path)
    first, second = read_rows(Path(file))

    assert (first.prompt[0].role, first.prompt[0].content) == ("user", "a")
    assert (first.data_source, first.reward_model.ground_truth, first.index) == ("python", "1", 0)
    assert (second.data_source, second.reward_model.ground_truth, second.index) == ("s", "2", 1)


def test_a_frame_has_the_rows_of_its_records(tmp_path: Path):
    records = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]

    assert row_files(pandas.DataFrame(records), tmp_path) == row_files(records, tmp_path)


def test_the_same_rows_are_the_same_file(tmp_path: Path):
    one, same, other = (row_files([{"prompt": text, "answer": 1}], tmp_path) for text in ("a", "a", "b"))

    assert one == same != other
    assert len(list((tmp_path / "rows").iterdir())) == 2


def test_paths_stay_as_they_are(tmp_path: Path):
    assert row_files("rows.jsonl", tmp_path) == ["rows.jsonl"]
    assert row_files([Path("a.parquet"), "b.jsonl"], tmp_path) == ["a.parquet", "b.jsonl"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "expected at least one row, got none"),
        ([{"question": "a"}], r"rows\[0\]: expected 'prompt', 'answer' and columns .*, got the column 'question'"),
        ([{"prompt": "a"}, {"answer": 2}], r"rows\[1\]: expected 'prompt'.*, got the columns none"),
        ([3], r"rows\[0\]: expected a dict with 'prompt' and 'answer', got int"),
    ],
)
def test_other_rows_are_refused(tmp_path: Path, rows: list, message: str):
    with pytest.raises(TrackwayError, match=message):
        row_files(rows, tmp_path)


def test_infinity_is_left_to_the_configuration_to_refuse():
    assert overrides({KEY: {"a": math.inf}}) == [f"{KEY}.a='inf'"]
    assert json.loads('"inf"') == given(overrides({KEY: {"a": math.inf}}))[f"{KEY}.a"]
