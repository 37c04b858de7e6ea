"""Trajectories as ATIF documents: Harbor's own validator accepts them, and they read back as they were."""

import json
import math

import pytest
from pydantic_core import to_json

from tests.services.trainer.run_state.atif_documents import harbors_errors
from trackway.trainer.run_state.atif import read_atif, to_atif
from trackway.wire.chat import FunctionCall, FunctionSchema, Message, ToolCall, ToolSchema
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.trajectory import StopReason, ToolCallRecord, Turn, WeightSpan

CALL = ToolCall(id="c0", function=FunctionCall(name="add", arguments='{"a":  1}'))
BROKEN = ToolCall(id="c1", function=FunctionCall(name="add", arguments="{"))
TURNS = [
    Turn(
        index=0,
        messages=[
            Message(role="assistant", content="let me add", tool_calls=[CALL, BROKEN]),
            Message(role="tool", content="2", tool_call_id="c0", name="add"),
            Message(role="tool", content="no such call", tool_call_id="c9", name="add"),
        ],
        response_start=0,
        response_end=2,
        finish_reason="stop",
        calls=[ToolCallRecord(tool="add", tool_call_id="c0", reward=0.5)],
        generate_s=0.25,
    ),
    Turn(
        index=1,
        messages=[Message(role="assistant", content="it is 2")],
        response_start=4,
        response_end=6,
        finish_reason="length",
    ),
]
TOOLS = [ToolSchema(function=FunctionSchema(name="add", description="Adds."))]
PROMPT = [
    Message(role="system", content="be brief"),
    Message(role="assistant", content="earlier"),
    Message(role="user", content="1 + 1?"),
]


@pytest.fixture
def trajectories(rollout):
    """A rollout of two turns, and the unusual ones by what is unusual."""
    two_turns = {"prompt_messages": PROMPT, "turns": TURNS}
    row = {
        "prompt_ids": [10],
        "response_ids": [50, 51],
        "response_mask": [0, 1],
        "response_logprobs": [-1.0, -2.0],
        "turns": [TURNS[0]],
    }
    error = ErrorBody(code=ErrorCode.INTERNAL, message="the tool server is gone", retryable=False)
    return {
        "two turns": rollout(7, 1, 1.0, **two_turns, weight_versions=[WeightSpan(version=3, start=0, end=6)]),
        "further rows": rollout(0, 0, 0.5, **two_turns, further_rows=[row, {**row, "turns": []}]),
        "tokens after the last turn": rollout(0, 0, 0.5, prompt_messages=PROMPT, turns=TURNS[:1]),
        "a logprob between turns": rollout(
            0, 0, 0.5, **two_turns, response_logprobs=[-4.0, -4.1, -9.0, 0.0, -4.2, -4.3]
        ),
        "an infinite logprob": rollout(
            0, 0, 0.5, **two_turns, response_logprobs=[-math.inf, -4.1, 0.0, 0.0, -4.2, -4.3]
        ),
        "nothing but an error": rollout(0, 0, reward=None, error=error, stop_reason=StopReason.ERROR),
        "text as its index": rollout("django-1", 0, 1.0, **two_turns),
    }


@pytest.fixture
def written(trajectories, tmp_path):
    """The file of each of these."""
    files = {name: tmp_path / f"{number}.json" for number, name in enumerate(trajectories)}
    for name, file in files.items():
        file.write_bytes(to_json(to_atif(trajectories[name], "models/tiny", TOOLS), inf_nan_mode="strings"))
    return files


def test_every_trajectory_reads_back_as_it_was(trajectories, written):
    assert {name: read_atif(file) for name, file in written.items()} == trajectories


def test_harbors_validator_accepts_every_trajectory(written):
    assert harbors_errors(written.values()) == {}


def test_harbors_validator_refuses_another_document(written):
    file = written["two turns"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": []}))

    assert [*harbors_errors(written.values())] == [file]


def test_steps_have_calls_results_tokens_and_logprobs(written):
    document = json.loads(written["two turns"].read_text())

    assert {name: document[name] for name in ("schema_version", "session_id", "trajectory_id", "final_metrics")} == {
        "schema_version": "ATIF-v1.8",
        "session_id": "s",
        "trajectory_id": "r/1/7/1",
        "final_metrics": {"total_prompt_tokens": 10, "total_completion_tokens": 4, "total_steps": 5},
    }
    assert document["agent"]["model_name"] == "models/tiny"
    assert document["agent"]["tool_definitions"][0]["function"]["name"] == "add"
    assert document["extra"]["reward"] == 1.0
    assert document["steps"] == [
        {"step_id": 1, "source": "system", "message": "be brief"},
        {"step_id": 2, "source": "agent", "message": "earlier", "is_copied_context": True},
        {"step_id": 3, "source": "user", "message": "1 + 1?"},
        {
            "step_id": 4,
            "source": "agent",
            "message": "let me add",
            "tool_calls": [
                {"tool_call_id": "c0", "function_name": "add", "arguments": {"a": 1}},
                {"tool_call_id": "c1", "function_name": "add", "arguments": {}, "extra": {"arguments_text": "{"}},
            ],
            "observation": {"results": [{"source_call_id": "c0", "content": "2"}, {"content": "no such call"}]},
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "prompt_token_ids": [10, 11, 12],
                "completion_token_ids": [20, 21],
                "logprobs": [-4.0, -4.1],
                "extra": {"finish_reason": "stop", "seconds": 0.25, "row": 0},
            },
        },
        {
            "step_id": 5,
            "source": "agent",
            "message": "it is 2",
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": 7,
                "completion_tokens": 2,
                "prompt_token_ids": [10, 11, 12, 20, 21, 30, 31],
                "completion_token_ids": [22, 23],
                "logprobs": [-4.2, -4.3],
                "extra": {"finish_reason": "length", "seconds": 0.0, "row": 0},
            },
        },
    ]


def test_tokens_are_written_once(written):
    rest = json.loads(written["two turns"].read_text())["extra"]["trackway"]

    assert not {"prompt_ids", "response_ids", "response_logprobs"} & set(rest)


def test_another_producers_document_has_its_messages_tokens_and_score(trajectories, written):
    document = json.loads(written["two turns"].read_text())
    del document["extra"]["trackway"]
    written["two turns"].write_text(json.dumps(document))

    read, ours = read_atif(written["two turns"]), trajectories["two turns"]

    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward", "prompt_messages", "id"):
        assert getattr(read, name) == getattr(ours, name)
    assert [(turn.response_start, turn.response_end) for turn in read.turns] == [(0, 2), (4, 6)]
    assert read.turns[0].messages == [
        Message(
            role="assistant",
            content="let me add",
            tool_calls=[
                ToolCall(id="c0", function=FunctionCall(name="add", arguments='{"a": 1}')),
                ToolCall(id="c1", function=FunctionCall(name="add", arguments="{}")),
            ],
        ),
        Message(role="tool", content="2", tool_call_id="c0", name="add"),
        Message(role="tool", content="no such call"),
    ]


@pytest.mark.parametrize("changed", ["logprobs", "prompt_token_ids"])
def test_tokens_that_are_no_single_row_are_left_out(written, changed):
    document = json.loads(written["two turns"].read_text())
    del document["extra"]
    document["steps"][4]["metrics"][changed] = [1]
    written["two turns"].write_text(json.dumps(document))

    read = read_atif(written["two turns"])

    assert (read.prompt_ids, read.response_ids, len(read.turns), read.reward) == ([], [], 2, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"schema_version": "ATIF-v9"}, "('schema_version',): String should match pattern '^ATIF-v1\\.\\d$'"),
        ({"steps": []}, "('steps',): List should have at least 1 item after validation, not 0"),
        ({"extra": {"trackway": {}}}, "'further_rows'"),
        (
            {"steps": [{"source": "user", "message": [{"type": "image"}]}]},
            "('steps', 0, 'message'): Value error, expected text, got {'type': 'image'}",
        ),
    ],
)
def test_a_file_that_is_no_document_is_refused(written, change, reason):
    file = written["two turns"]
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(TrackwayError) as refused:
        read_atif(file)

    assert refused.value.message == (
        f"expected an ATIF document in {file}, got another file ({reason}); check it with Harbor's validator"
    )
