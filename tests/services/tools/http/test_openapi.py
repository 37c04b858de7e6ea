"""The OpenAPI document: what a client generator and a reader of /docs find there."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ERRORS, ErrorCode, ErrorReply

pytestmark = pytest.mark.anyio

Operation = dict[str, Any]


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    (tmp_path / "paris.txt").write_text("Paris is the capital of France.")
    tools = ["calculator", "calc_gsm8k_reward", "search"]
    config = {"search": {"documents": str(tmp_path)}}
    return create_app(ToolsSettings.model_validate({"tools": tools, "tool_config": config}))


@pytest.fixture
def operations(app: FastAPI) -> dict[str, Operation]:
    """Every operation by its id, with method and path."""
    return {
        operation["operationId"]: {"method": method, "path": path, **operation}
        for path, methods in app.openapi()["paths"].items()
        for method, operation in methods.items()
    }


def test_operations_are_named_for_client_generators(operations: dict[str, Operation]) -> None:
    assert {f"{operation['method'].upper()} {operation['path']}": name for name, operation in operations.items()} == {
        "GET /tools": "list_tools",
        "POST /tools/{name}/execute": "execute_tool",
        "POST /instances": "create_instance",
        "GET /instances": "list_instances",
        "POST /instances/{instance_id}/execute": "execute_instance",
        "POST /instances/{instance_id}/reward": "reward_instance",
        "DELETE /instances/{instance_id}": "release_instance",
        "DELETE /sessions/{session_id}": "release_session",
        "POST /get_observation": "get_observation",
        "POST /retrieve": "retrieve",
        "GET /health": "health",
        "GET /ready": "readiness",
        "GET /metrics": "metrics_text",
    }


def test_every_error_is_documented_with_our_body_and_a_message_to_read(operations: dict[str, Operation]) -> None:
    documented: set[str] = set()
    for operation in operations.values():
        if operation["tags"] == ["service"]:
            continue
        for status, answer in operation["responses"].items():
            if not status.isdigit() or int(status) < 400:
                continue
            for code, example in answer["content"]["application/json"]["examples"].items():
                error = ErrorReply.model_validate(example["value"]).error
                assert (error.code.value, ERRORS[error.code].status) == (code, int(status))
                documented.add(code)
            assert answer["content"]["application/json"]["schema"]["$ref"].endswith("/ErrorReply")
    assert documented == {
        code.value
        for code in (
            ErrorCode.INVALID_REQUEST,
            ErrorCode.UNAUTHORIZED,
            ErrorCode.FORBIDDEN,
            ErrorCode.UNKNOWN_TOOL,
            ErrorCode.INSTANCE_NOT_FOUND,
            ErrorCode.INSTANCE_LOST,
            ErrorCode.CONFLICT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.OVERLOADED,
            ErrorCode.TOOL_FAILED,
            ErrorCode.TOOL_TIMEOUT,
            ErrorCode.DEADLINE_EXCEEDED,
            ErrorCode.UNAVAILABLE,
            ErrorCode.INTERNAL,
        )
    }


def test_a_refusal_for_lack_of_room_says_when_to_come_back(operations: dict[str, Operation]) -> None:
    for name in ("create_instance", "execute_instance", "execute_tool"):
        assert "Retry-After" in operations[name]["responses"]["429"]["headers"]


async def test_the_examples_of_requests_work_as_they_stand_and_answer_in_the_shape_of_theirs(
    running, app: FastAPI, operations: dict[str, Operation]
) -> None:
    async with running(app) as http:
        instance_id = (await sent(http, operations["create_instance"])).json()["instance_id"]
        for name in (
            "execute_instance",
            "reward_instance",
            "execute_tool",
            "get_observation",
            "retrieve",
            "list_tools",
            "list_instances",
            "release_instance",
            "release_session",
        ):
            operation = operations[name]
            ids = {"instance_id": instance_id, "name": "calculator", "session_id": "gsm8k-demo%2F1%2F17%2F0"}
            answer = await sent(http, operation, **ids)
            assert answer.is_success, (name, answer.text)
            example = operation["responses"][str(answer.status_code)].get("content", {})
            if example:
                assert shape(answer.json()) == shape(example["application/json"]["example"]), name


async def sent(http: httpx.AsyncClient, operation: Operation, **ids: str) -> httpx.Response:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    examples = body.get("examples") or body.get("schema", {}).get("examples")
    return await http.request(
        operation["method"].upper(), operation["path"].format(**ids), json=examples[0] if examples else None
    )


def shape(value: object) -> object:
    """Names and kinds; of a list its first element."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items() if key not in ("metrics", "parameters")}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


async def test_a_wrong_method_is_told_every_right_one(running, app: FastAPI) -> None:
    async with running(app) as http:
        answers = [await http.request("PATCH", path) for path in ("/instances", "/instances/x", "/retrieve")]

    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [
        (405, "GET, POST"),
        (405, "DELETE"),
        (405, "POST"),
    ]
