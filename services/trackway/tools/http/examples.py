"""The OpenAPI document at /docs: requests that work as they stand, their responses, and the errors of each route."""

from http import HTTPStatus
from typing import Any

from pydantic import JsonValue

from trackway.serving.error_responses import documented_error
from trackway.wire.errors import ERRORS, ErrorCode, TrackwayError

Responses = dict[int | str, dict[str, Any]]

EVERYWHERE = (ErrorCode.UNAUTHORIZED, ErrorCode.INVALID_REQUEST, ErrorCode.INTERNAL)
POSTED = (*EVERYWHERE, ErrorCode.CONFLICT, ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.DEADLINE_EXCEEDED)
_RUNS_TOOL = (ErrorCode.OVERLOADED, ErrorCode.TOOL_FAILED, ErrorCode.TOOL_TIMEOUT, ErrorCode.UNAVAILABLE)
CREATES = (*POSTED, ErrorCode.UNKNOWN_TOOL, *_RUNS_TOOL)
CALLS = (*POSTED, ErrorCode.INSTANCE_NOT_FOUND, ErrorCode.INSTANCE_LOST, *_RUNS_TOOL)

_ID = "81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f"
_MESSAGES: dict[ErrorCode, str] = {
    ErrorCode.INVALID_REQUEST: (
        "calculator: missing argument: 'expression' is a required property; expected arguments: expression"
    ),
    ErrorCode.UNAUTHORIZED: "expected a bearer token that this service knows; send `Authorization: Bearer <token>`",
    ErrorCode.FORBIDDEN: (
        "expected a token with the scope 'admin', got 'agents' with 'execute'; use an operator's token"
    ),
    ErrorCode.UNKNOWN_TOOL: (
        "expected one of the tools calc_gsm8k_reward, calculator, got 'abacus'; "
        "GET /tools lists them with their schemas"
    ),
    ErrorCode.INSTANCE_NOT_FOUND: (
        f"expected a living instance, got 'replica0-{_ID}': never made here, released, or idle for more than 3600 s; "
        "POST /instances makes a new one"
    ),
    ErrorCode.INSTANCE_LOST: (
        f"expected an instance of replica replica1-0c3f52d1, got replica0-{_ID}, made by another replica; "
        "send x-session-id with every call, or create the instance again and replay its calls"
    ),
    ErrorCode.CONFLICT: "idempotency-key 'a1' was used with another body; take a new key",
    ErrorCode.PAYLOAD_TOO_LARGE: "expected a body of at most 16777216 bytes, got 20000000 or more; send less at once",
    ErrorCode.OVERLOADED: "tool 'python': expected a free place within 60 s; ask again later, or add replicas",
    ErrorCode.TOOL_FAILED: "tool 'python' failed in execute: OSError: No space left on device",
    ErrorCode.UNAVAILABLE: "search: the retriever http://127.0.0.1:8000/retrieve did not answer",
    ErrorCode.INTERNAL: "KeyError: 'x'; this is a bug; see the traceback in the service's log",
    ErrorCode.DEADLINE_EXCEEDED: ("the caller's deadline 1763800000.000 passed during the request; allow more time"),
    ErrorCode.TOOL_TIMEOUT: (
        "tool 'python': expected execute to end within 30 s; ask for less at once, or raise call_timeout_s"
    ),
}


def responses(status: int, example: JsonValue, *codes: ErrorCode, links: tuple[str, ...] = ()) -> Responses:
    """A response with its example, and the errors of these codes. `links` name operations that take its instance."""
    answer: dict[str, Any] = {} if status == HTTPStatus.NO_CONTENT else _json({"example": example})
    if links:
        answer["links"] = {name: _link(name) for name in links}
    documented: Responses = {status: answer}
    for code in sorted(codes, key=lambda code: ERRORS[code].status):
        _add(documented, code)
    return documented


def _add(documented: Responses, code: ErrorCode) -> None:
    error = TrackwayError(code, _MESSAGES[code])
    entry = documented.setdefault(error.status, documented_error(""))
    entry["description"] = ", ".join(filter(None, (entry["description"], f"`{code.value}`")))
    examples = entry["content"]["application/json"].setdefault("examples", {})
    examples[code.value] = {"value": error.to_reply().model_dump(mode="json")}
    if code is ErrorCode.OVERLOADED:
        entry["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}


def _json(content: dict[str, JsonValue]) -> dict[str, Any]:
    return {"content": {"application/json": content}}


def _link(operation: str) -> dict[str, JsonValue]:
    return {"operationId": operation, "parameters": {"path.instance_id": "$response.body#/instance_id"}}


CREATE: dict[str, JsonValue] = {
    "tool": "calc_gsm8k_reward",
    "session_id": "gsm8k-demo/1/17/0",
    "create_kwargs": {"ground_truth": "72"},
}
EXECUTE: dict[str, JsonValue] = {"arguments": {"answer": "72"}, "tool_call_id": "call_0"}
ONE_SHOT: dict[str, JsonValue] = {"arguments": {"expression": "(84 + 16) / 4"}}

CREATED: JsonValue = {
    "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
    "tool": "calc_gsm8k_reward",
}
EXECUTED: JsonValue = {"text": "Current parsed answer='72' reward=1.0", "reward": 0.0, "metrics": {}}
CALCULATED: JsonValue = {"text": "25", "reward": 0.0, "metrics": {}, "instance_reward": 0.0}
REWARD: JsonValue = {"reward": 1.0}
INSTANCES: JsonValue = {
    "instances": [
        {
            "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
            "tool": "calc_gsm8k_reward",
            "session_id": "gsm8k-demo/1/17/0",
            "state": "idle",
            "age_s": 12.5,
            "idle_s": 3.25,
        }
    ],
    "total": 1,
}
SESSION_RELEASED: JsonValue = {"released": 2, "failed": []}

RETRIEVE: dict[str, JsonValue] = {"queries": ["capital of France"], "topk": 3, "return_scores": True}
RETRIEVED: JsonValue = {
    "result": [
        [{"document": {"id": "paris.md#0", "contents": '"Paris"\nParis is the capital of France.'}, "score": 1.42}]
    ]
}

OBSERVE: dict[str, JsonValue] = {
    "trajectory_ids": ["t-1", "t-2"],
    "actions": [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(84 + 16) / 4"}}</tool_call>',
        "no call",
    ],
    "extra_fields": [{}, {}],
    "finish": [False, True],
}
OBSERVED: JsonValue = {
    "observations": ["\n<tool_response>\n25\n</tool_response>\n", ""],
    "dones": [False, True],
    "valids": [True, True],
    "processing_time_ms": 0.4,
}
TOOLS: JsonValue = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluate an arithmetic expression and return its value.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "Numbers and operators"}},
                    "required": ["expression"],
                },
            },
        }
    ],
    "stateless": ["calculator"],
}
