"""Rows in parquet files."""

import json
import logging
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import JsonValue

from trackway.trainer.data import row_files
from trackway.trainer.data.row_files import read_rows, write_rows
from trackway.trainer.data.rows import ExtraInfo, ToolKwargs, make_row
from trackway.trainer.data.tiny import make_tiny_rows
from trackway.wire.agent import Sample
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError


def _row(index: int, tools: dict[str, ToolKwargs]) -> Sample:
    extra_info = ExtraInfo(split="train", index=index, answer="#### 7", question="q", tools_kwargs=tools)
    return make_row(
        data_source="x", prompt=[Message(role="user", content="q")], ground_truth="7", extra_info=extra_info
    )


def _record(**columns: JsonValue) -> dict[str, JsonValue]:
    prompt: JsonValue = [{"role": "user", "content": "q"}]
    return {
        "data_source": "x",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": "1"},
    } | columns


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = make_tiny_rows("train", 40, seed=0)

    write_rows(tmp_path / "new" / "train.parquet", rows)

    assert read_rows(tmp_path / "new" / "train.parquet") == rows


def test_rows_with_different_tools_keep_only_their_own(tmp_path: Path) -> None:
    rows = [
        _row(0, {}),
        _row(1, {"calculator": ToolKwargs(create_kwargs={"precision": 2})}),
        _row(2, {"search": ToolKwargs(execute_kwargs={"sources": ["a", "b"]})}),
    ]

    write_rows(tmp_path / "rows.parquet", rows)

    read = read_rows(tmp_path / "rows.parquet")
    assert [row.extra_info["tools_kwargs"] for row in read] == [
        {},
        {"calculator": {"create_kwargs": {"precision": 2}}},
        {"search": {"execute_kwargs": {"sources": ["a", "b"]}}},
    ]


def test_a_column_that_the_first_row_lacks_is_kept(tmp_path: Path) -> None:
    rows = [_row(0, {}).model_copy(update={"agent_name": None}), _row(1, {})]

    write_rows(tmp_path / "rows.parquet", rows)

    assert [row.agent_name for row in read_rows(tmp_path / "rows.parquet")] == [None, "tool_agent"]


def test_a_file_that_datasets_wrote_is_read(tmp_path: Path) -> None:
    tools: JsonValue = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1"}}}
    records = [
        _record(extra_info={"index": 5, "tools_kwargs": tools}),
        _record(extra_info={"index": 6, "tools_kwargs": {"other": {"create_kwargs": {"k": 1}}}}),
    ]
    datasets.Dataset.from_list(records).to_parquet(tmp_path / "verl.parquet")

    rows = read_rows(tmp_path / "verl.parquet")

    assert [row.index for row in rows] == [5, 6]
    assert rows[0].extra_info["tools_kwargs"] == tools


def test_datasets_reads_the_nested_structs_that_were_written(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet", [_row(4, {"calculator": ToolKwargs(create_kwargs={"precision": 2})})])

    (record,) = datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=str(tmp_path))

    assert isinstance(record, dict)
    assert record["prompt"] == [{"role": "user", "content": "q"}]
    assert record["extra_info"]["tools_kwargs"] == {"calculator": {"create_kwargs": {"precision": 2}}}
    assert record["extra_info"]["index"] == 4


def test_a_long_reading_says_how_far_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.parquet"
    write_rows(file, [_row(0, {}), _row(1, {})])

    with caplog.at_level(logging.INFO):
        read_rows(file)
        monkeypatch.setattr(row_files, "EVERY_S", -1.0)
        read_rows(file)

    assert caplog.messages == [f"{file}: rows read: 1", f"{file}: rows read: 2"]


def test_a_jsonl_file_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(_record(extra_info={"index": 2})) + "\n")

    assert [row.index for row in read_rows(tmp_path / "rows.jsonl")] == [2]


@pytest.mark.parametrize("text", ["[\n  {a},\n  {b}\n]", "{a}\n{b}\n"], ids=["a list", "lines"])
def test_a_json_file_is_one_list_or_lines(tmp_path: Path, text: str) -> None:
    a, b = (json.dumps(_record(extra_info={"index": index})) for index in (4, 9))
    (tmp_path / "rows.json").write_text(text.replace("{a}", a).replace("{b}", b))

    assert [row.index for row in read_rows(tmp_path / "rows.json")] == [4, 9]


def test_a_json_list_that_ends_early_or_holds_another_thing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "early.json").write_text(f"[{json.dumps(_record())},")
    (tmp_path / "other.json").write_text(f"[{json.dumps(_record())}, 7]")

    with pytest.raises(TrackwayError, match=r"expected JSON in .*early\.json, got a list that does not parse"):
        read_rows(tmp_path / "early.json")
    with pytest.raises(TrackwayError, match=r"other\.json:2: expected a JSON object, got int"):
        read_rows(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("data/train.parqet", "data/train.parqet, got none; {data} has test.jsonl, train.parquet"),
        ("data", "data, got a folder; {data} has test.jsonl, train.parquet"),
        ("nowhere/train.parquet", "got none; make one with `trackway data`"),
    ],
)
def test_a_file_that_is_not_there_is_met_with_those_that_are(tmp_path: Path, name: str, message: str) -> None:
    data = tmp_path / "data"
    write_rows(data / "train.parquet", [_row(0, {})])
    (data / "test.jsonl").touch()
    (data / "notes.txt").touch()

    with pytest.raises(TrackwayError) as caught:
        read_rows(tmp_path / name)

    assert caught.value.code is ErrorCode.NOT_FOUND
    assert caught.value.message.endswith(message.replace("{data}", str(data)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.parquet", "got one that cannot be read"),
        ("rows.csv", r"expected a file ending in \.parquet or \.jsonl or \.json"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("a,b\n")

    with pytest.raises(TrackwayError, match=message):
        read_rows(tmp_path / name)


def test_missing_columns_are_named_with_those_found(tmp_path: Path) -> None:
    pq.write_table(pa.table({"data_source": ["x"], "question": ["q"]}), tmp_path / "rows.parquet")

    with pytest.raises(TrackwayError, match="missing prompt, reward_model of data_source, question; write prompt as"):
        read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompts": [], "data_source": "x", "reward_model": {}},
            "missing prompt (is it prompts? rename it) of prompts",
        ),
        (
            {"datasource": "x", "prompt": [], "reward": {}},
            "data_source (is it datasource? rename it), reward_model (is",
        ),
        ({"question": "q", "answer": "#### 1"}, "`trackway data gsm8k --local-dataset-path <its folder>`"),
    ],
)
def test_columns_of_other_names_are_met_with_the_name_that_is_meant(
    tmp_path: Path, columns: dict[str, JsonValue], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(columns))

    with pytest.raises(TrackwayError) as caught:
        read_rows(tmp_path / "rows.jsonl")

    assert message in caught.value.message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"prompt": "What is 1+1?"},
            """got prompt: Input should be a valid list, got str; write prompt as [{"role": "user", "cont""",
        ),
        ({"reward_model": "1"}, """; write reward_model as {"style": "rule", "ground_truth": "<text>"}"""),
        (
            {"extra_info": {"index": [1]}},
            "rows.jsonl:1: expected verl's row schema, got extra_info: index: expected a whole number or 1 to 128 "
            'printable characters, got [1]; write extra_info as {"index": <number or text>',
        ),
        ({"extra_info": {"index": 1.5}}, "got extra_info: index: expected a whole number"),
        ({"extra_info": {"tools_kwargs": "zz"}}, "got extra_info: tools_kwargs: expected an object, got str; write"),
        (
            {"extra_info": {"tools_kwargs": {"calculator": {"create_kwargs": [1]}}}},
            "got extra_info: tools_kwargs.calculator.create_kwargs: expected an object, got list; write",
        ),
        ({"extra_info": "zz"}, "got extra_info: Input should be a valid dictionary, got str; write"),
        (
            {"reward_model": {"ground_truth": ["4"]}},
            "rows.jsonl:1: expected verl's row schema, got reward_model.ground_truth: Input should be a valid string, "
            'got list; write reward_model as {"style": "rule", "ground_truth": "<text>"}',
        ),
        ({"prompt": [{"role": "user", "content": 4}]}, "prompt.0.content: Input should be a valid string, got int; w"),
    ],
)
def test_a_column_of_another_shape_is_met_with_the_shape_that_is_meant(
    tmp_path: Path, columns: dict[str, JsonValue], message: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(_record(**columns)))

    with pytest.raises(TrackwayError) as caught:
        read_rows(tmp_path / "rows.jsonl")

    assert message in caught.value.message


@pytest.mark.parametrize(("written", "text"), [(42, "42"), (3.5, "3.5"), ("007", "007")])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_truth_may_be_a_number(tmp_path: Path, suffix: str, written: object, text: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    record = _record(reward_model={"style": "rule", "ground_truth": written})  # pyright: ignore[reportArgumentType]
    if suffix == "jsonl":
        path.write_text(json.dumps(record))
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)

    assert [row.reward_model.ground_truth for row in read_rows(path)] == [text]


@pytest.mark.parametrize(
    ("written", "index"), [(7, 7), ("7", 7), (7.0, 7), ("007", "007"), ("django__django-11099", "django__django-11099")]
)
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_row_may_be_numbered_or_named(tmp_path: Path, suffix: str, written: object, index: int | str) -> None:
    path = tmp_path / f"rows.{suffix}"
    record = _record(extra_info={"index": written})  # pyright: ignore[reportArgumentType]
    if suffix == "jsonl":
        path.write_text(json.dumps(record))
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)

    [row] = read_rows(path)

    assert row.index == index and type(row.index) is type(index)


def test_text_that_is_no_unicode_is_named_by_its_line(tmp_path: Path) -> None:
    lines = [json.dumps(_record()), json.dumps(_record(prompt=[{"role": "user", "content": "half \ud83d"}]))]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    (tmp_path / "rows.json").write_text(f"[{', '.join(lines)}]")

    with pytest.raises(TrackwayError, match=r"rows\.jsonl:2: .*expected text, got a lone surrogate, \\ud83d"):
        read_rows(tmp_path / "rows.jsonl")
    with pytest.raises(TrackwayError, match=r"rows\.json:2: .*expected text, got a lone surrogate, \\ud83d"):
        read_rows(tmp_path / "rows.json")


def test_a_bad_row_is_named_by_file_line_and_field(tmp_path: Path) -> None:
    lines = [_record(), _record(prompt=[{"role": "robot", "content": "q"}])]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))

    with pytest.raises(TrackwayError, match=r"rows\.jsonl:2: expected verl's row schema, got prompt\.0\.role"):
        read_rows(tmp_path / "rows.jsonl")


def test_all_bad_rows_are_one_error_with_each_reason_once(tmp_path: Path) -> None:
    lines = [_record(), *[_record(prompt="no list")] * 5, _record(data_source=1)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))

    with pytest.raises(TrackwayError) as caught:
        read_rows(tmp_path / "rows.jsonl")

    message = caught.value.message
    assert message.startswith("6 of 7 records are not rows: ") and message.endswith("and 4 more")
    assert [line for line in range(1, 8) if f"rows.jsonl:{line}: expected" in message] == [2, 7]


def test_a_broken_line_is_an_error_and_not_skipped(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(_record()) + "\n{broken\n")

    with pytest.raises(TrackwayError, match=r"rows\.jsonl:2: expected a JSON object"):
        read_rows(tmp_path / "rows.jsonl")


def test_keys_of_several_types_are_an_error_that_names_the_column(tmp_path: Path) -> None:
    rows = [
        _row(0, {"t": ToolKwargs(create_kwargs={"k": "1"})}),
        _row(1, {"t": ToolKwargs(create_kwargs={"k": 1})}),
    ]

    with pytest.raises(TrackwayError, match="column extra_info"):
        write_rows(tmp_path / "rows.parquet", rows)


def test_writing_no_rows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TrackwayError, match="expected at least one row"):
        write_rows(tmp_path / "rows.parquet", [])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [_row(0, {})]
    write_rows(tmp_path / "rows.parquet", rows)

    def fail_half_way(_table: pa.Table, path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        write_rows(tmp_path / "rows.parquet", [_row(1, {})])

    assert read_rows(tmp_path / "rows.parquet") == rows
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]
