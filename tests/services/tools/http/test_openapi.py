"""The OpenAPI document: what a client generator and a reader of /docs find there."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings

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


async def test_the_examples_of_requests_work_as_they_stand(
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


async def sent(http: httpx.AsyncClient, operation: Operation, **ids: str) -> httpx.Response:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    examples = body.get("examples") or body.get("schema", {}).get("examples")
    return await http.request(
        operation["method"].upper(), operation["path"].format(**ids), json=examples[0] if examples else None
    )


async def test_a_wrong_method_is_told_every_right_one(running, app: FastAPI) -> None:
    async with running(app) as http:
        answers = [await http.request("PATCH", path) for path in ("/instances", "/instances/x", "/retrieve")]

    assert [(answer.status_code, answer.headers["allow"]) for answer in answers] == [
        (405, "GET, POST"),
        (405, "DELETE"),
        (405, "POST"),
    ]
