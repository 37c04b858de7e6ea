"""GSM8K (`question`, `answer` ending in `#### N`) as rows for multi-turn training with a tool."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trackway.trainer.data.records import Record, Rejected
from trackway.trainer.data.rows import ExtraInfo, InteractionKwargs, Split, ToolKwargs, make_row
from trackway.wire.agent import Sample
from trackway.wire.chat import Message

DATA_SOURCE = "openai/gsm8k"
TOOL = "calc_gsm8k_reward"
SYSTEM = (
    "You are a math expert. You are given a question and you need to solve it step by step. "
    "Reasoning step by step before any tool call. "
    f"You should use the `{TOOL}` tool after step by step solving the question, "
    "before generate final answer at least once and refine your answer if necessary. "
    "Put your final answer in the format of `#### <answer>`."
)
"""verl's system prompt, word for word (examples/data_preprocess/gsm8k_multiturn_w_tool.py), so that rows are equal."""
INSTRUCTION = "Let's think step by step and output the final answer after `####`."
GROUND_TRUTH = re.compile(r"#### (\-?[0-9\.\,]+)")


@dataclass(frozen=True)
class Gsm8kRows:
    """One split: its rows, and the rejected records."""

    rows: list[Sample]
    rejected: list[Rejected]


def load_gsm8k(records: Iterable[Record | Rejected], split: Split) -> Gsm8kRows:
    """The rows of a split's records. A row's index is its record's position in the source."""
    loaded = Gsm8kRows(rows=[], rejected=[])
    for index, record in enumerate(records):
        row = record if isinstance(record, Rejected) else gsm8k_row(record, split, index)
        if isinstance(row, Rejected):
            loaded.rejected.append(row)
        else:
            loaded.rows.append(row)
    return loaded


def gsm8k_row(record: Record, split: Split, index: int) -> Sample | Rejected:
    """The record as a row, or the reason for its rejection."""
    try:
        question, answer = _text(record, "question"), _text(record, "answer")
        ground_truth = extract_ground_truth(answer)
    except ValueError as error:
        return Rejected(record.file, record.line, str(error))
    user = f"{question} {INSTRUCTION}"
    return make_row(
        data_source=DATA_SOURCE,
        prompt=[Message(role="system", content=SYSTEM), Message(role="user", content=user)],
        ground_truth=ground_truth,
        extra_info=ExtraInfo(
            split=split,
            index=index,
            answer=answer,
            question=question,
            need_tools_kwargs=True,
            tools_kwargs={TOOL: ToolKwargs(create_kwargs={"ground_truth": ground_truth})},
            interaction_kwargs=InteractionKwargs(query=user, ground_truth=ground_truth),
        ),
    )


def extract_ground_truth(answer: str) -> str:
    """The number after `#### `, without thousands separators. Raises ValueError when there is none."""
    match = GROUND_TRUTH.search(answer)
    number = match[1].replace(",", "") if match else ""
    if not any(character.isdigit() for character in number):
        raise ValueError(f"expected an answer ending in '#### <number>', got one ending in {answer[-40:]!r}")
    return number


def _text(record: Record, field: str) -> str:
    if field not in record.data:
        raise ValueError(f"expected the field {field!r}, got only {sorted(record.data)}")
    value = record.data[field]
    if not isinstance(value, str):
        raise ValueError(f"expected text in {field!r}, got {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"expected text in {field!r}, got an empty string")
    return value
