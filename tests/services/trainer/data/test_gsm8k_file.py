"""A written GSM8K file, read by plain pyarrow: the row that verl's multi-turn recipe with a tool takes."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trackway.trainer.data.make import make_gsm8k

QUESTION = "Natalia sold 1,200 clips in April and half as many in May. How many clips did she sell altogether?"
ANSWER = "She sold 1200/2 = <<1200/2=600>>600 clips in May.\nAltogether 1200+600 = <<1200+600=1800>>1800.\n#### 1,800"
USER = f"{QUESTION} Let's think step by step and output the final answer after `####`."

GROUND_TRUTH = pa.struct([("ground_truth", pa.string())])
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("agent_name", pa.string()),
        ("prompt", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("ground_truth", pa.string()), ("style", pa.string())])),
        (
            "extra_info",
            pa.struct(
                [
                    ("answer", pa.string()),
                    ("index", pa.int64()),
                    ("interaction_kwargs", pa.struct([("ground_truth", pa.string()), ("query", pa.string())])),
                    ("need_tools_kwargs", pa.bool_()),
                    ("question", pa.string()),
                    ("split", pa.string()),
                    (
                        "tools_kwargs",
                        pa.struct([("calc_gsm8k_reward", pa.struct([("create_kwargs", GROUND_TRUTH)]))]),
                    ),
                ]
            ),
        ),
    ]
)


@pytest.fixture
def written(tmp_path: Path) -> pa.Table:
    other_row = {"question": "Six and one?", "answer": "#### 7"}
    for split, records in (("train", [other_row, {"question": QUESTION, "answer": ANSWER}]), ("test", [other_row])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, records)))
    make_gsm8k(tmp_path, tmp_path / "out")
    return pq.read_table(tmp_path / "out" / "train.parquet")


def test_every_column_holds_what_the_recipe_reads(written: pa.Table) -> None:
    row = written.to_pylist()[1]

    system, user = row.pop("prompt")
    assert user == {"role": "user", "content": USER}
    assert (system["role"], system["content"].count("`calc_gsm8k_reward`")) == ("system", 1)
    assert system["content"].endswith("Put your final answer in the format of `#### <answer>`.")
    assert row == {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1800"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "answer": ANSWER,
            "question": QUESTION,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1800"}}},
            "interaction_kwargs": {"query": USER, "ground_truth": "1800"},
        },
    }


def test_columns_have_plain_types_and_no_others_exist(written: pa.Table) -> None:
    assert _sorted(pa.struct(list(written.schema))) == _sorted(pa.struct(list(SCHEMA)))


def _sorted(kind: pa.DataType) -> pa.DataType:
    """The type with the keys of every struct in alphabetical order; a table need not keep one."""
    if pa.types.is_struct(kind):
        fields = [pa.field(kind.field(i).name, _sorted(kind.field(i).type)) for i in range(kind.num_fields)]
        return pa.struct(sorted(fields, key=lambda field: field.name))
    return pa.list_(_sorted(kind.value_type)) if pa.types.is_list(kind) else kind
