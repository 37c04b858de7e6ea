"""GSM8K as rows."""

import json
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import JsonValue

from trackway.trainer.data.make import SYSTEM, extract_ground_truth, gsm8k_row, load_gsm8k
from trackway.trainer.data.row_files import Record, Rejected, read_records
from trackway.wire.agent import Sample

GOOD: dict[str, JsonValue] = {"question": "Six and one?", "answer": "6+1=<<6+1=7>>7\n#### 7"}


def _row(data: dict[str, JsonValue], index: int = 0) -> Sample | Rejected:
    return gsm8k_row(Record(Path("train.jsonl"), 4, data), "train", index)


def test_a_record_becomes_a_row_in_verls_schema() -> None:
    row = _row(GOOD, index=12)

    assert isinstance(row, Sample)
    user = "Six and one? Let's think step by step and output the final answer after `####`."
    assert (row.data_source, row.agent_name, row.ability) == ("openai/gsm8k", "tool_agent", "math")
    assert [(message.role, message.content) for message in row.prompt] == [("system", SYSTEM), ("user", user)]
    assert row.reward_model.model_dump() == {"style": "rule", "ground_truth": "7"}
    assert row.extra_info == {
        "split": "train",
        "index": 12,
        "answer": GOOD["answer"],
        "question": "Six and one?",
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "7"}}},
        "interaction_kwargs": {"query": user, "ground_truth": "7"},
    }


def test_the_system_message_is_verls_word_for_word() -> None:
    assert SYSTEM == (
        "You are a math expert. You are given a question and you need to solve it step by step. Reasoning step by step "
        "before any tool call. You should use the `calc_gsm8k_reward` tool after step by step solving the question, "
        "before generate final answer at least once and refine your answer if necessary. Put your final answer in the "
        "format of `#### <answer>`."
    )


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("#### 18", "18"),
        ("x\n#### 1,234,567", "1234567"),
        ("#### -3", "-3"),
        ("#### 2.50", "2.50"),
        ("#### 5\n", "5"),
    ],
)
def test_the_ground_truth_is_the_number_after_the_hashes_without_commas(answer: str, number: str) -> None:
    assert extract_ground_truth(answer) == number


@pytest.mark.parametrize("answer", ["7", "####7", "#### seven", "#### ,", "#### -"])
def test_an_answer_without_a_number_after_the_hashes_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="expected an answer ending in '#### <number>'"):
        extract_ground_truth(answer)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"answer": "#### 1"}, "expected the field 'question', got only ['answer']"),
        ({"question": "q", "answer": 5}, "expected text in 'answer', got int"),
        ({"question": " ", "answer": "#### 1"}, "expected text in 'question', got an empty string"),
        (
            {"question": "q", "answer": "one"},
            "expected an answer ending in '#### <number>', got one ending in 'one'",
        ),
    ],
    ids=["missing field", "not a string", "empty", "no hashes"],
)
def test_a_malformed_record_is_rejected_with_file_line_and_reason(data: dict[str, JsonValue], reason: str) -> None:
    assert _row(data) == Rejected(Path("train.jsonl"), 4, reason)


def test_every_line_is_either_a_row_or_rejected(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(
        b"\n".join([json.dumps(GOOD).encode(), b"{broken", b"", b"[1]", b"\xff", json.dumps(GOOD).encode()])
    )

    loaded = load_gsm8k(read_records(file), "train")

    assert [row.index for row in loaded.rows] == [0, 4]
    assert [(rejected.file, rejected.line) for rejected in loaded.rejected] == [
        (file, 2),
        (file, 4),
        (file, 5),
    ]
    assert loaded.rejected[1].reason == "expected a JSON object, got list"
    assert "does not parse" in loaded.rejected[0].reason


def test_indexes_run_on_over_the_files_of_a_split(tmp_path: Path) -> None:
    files = [tmp_path / "train-0.parquet", tmp_path / "train-1.parquet"]
    for file in files:
        pq.write_table(pa.Table.from_pylist([GOOD, GOOD]), file)

    loaded = load_gsm8k(chain.from_iterable(map(read_records, files)), "train")

    assert [row.index for row in loaded.rows] == [0, 1, 2, 3]
    assert loaded.rejected == []


def test_a_null_in_parquet_is_rejected_by_row_number(tmp_path: Path) -> None:
    file = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD, {"question": "q", "answer": None}]), file)

    loaded = load_gsm8k(read_records(file), "test")

    assert loaded.rejected == [Rejected(file, 2, "expected text in 'answer', got NoneType")]
