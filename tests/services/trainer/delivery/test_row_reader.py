"""The rows after a step, read from the end of the file."""

from pathlib import Path

import pytest

from trackway.trainer.delivery import mlflow_run
from trackway.trainer.delivery.mlflow_run import RowReader
from trackway.wire.trainer import MetricsRow


@pytest.fixture(params=[16, 1 << 16], ids=["small blocks", "one block"])
def file(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of the steps 0 to 9, each of two values."""
    monkeypatch.setattr(mlflow_run, "_BLOCK", request.param)
    file = tmp_path / "metrics.jsonl"
    rows = [MetricsRow(step=step, data={"x": step / 2, "y": 1.0}) for step in range(10)]
    file.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    return file


@pytest.mark.parametrize(("step", "steps"), [(-1, range(10)), (0, range(1, 10)), (6, (7, 8, 9)), (9, ()), (99, ())])
def test_rows_after_a_step_are_given_in_order_and_counted(file: Path, step: int, steps):
    reader = RowReader(file)

    assert [row.step for row in reader.after(step, 1000)] == list(steps)
    assert reader.count_after(step) == len(steps)


@pytest.mark.parametrize(("values", "steps"), [(6, [3, 4, 5]), (7, [3, 4, 5]), (1, [3])])
def test_as_many_rows_are_given_as_have_so_many_values_and_one_at_least(file: Path, values: int, steps: list[int]):
    assert [row.step for row in RowReader(file).after(2, values)] == steps


def test_a_row_that_is_cut_off_or_damaged_is_left_out(file: Path):
    with file.open("a") as appended:
        appended.write('{"step":10,"data":{"x":"?"}}\n{"step":11,"data":{"x":1.0}}\n{"step":12,"da')

    assert [row.step for row in RowReader(file).after(8, 1000)] == [9, 11]


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path):
    reader = RowReader(tmp_path / "metrics.jsonl")

    assert (reader.after(-1, 10), reader.count_after(-1)) == ([], 0)
