"""Functions of this process behind a tool server and a reward service, over HTTP."""

import asyncio
import logging
import stat
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trackway.clients import CallPolicy, RewardClient, ToolsClient, run
from trackway.deploy.api.given import Functions
from trackway.reward.app import create_app as reward_app
from trackway.reward.settings import RewardSettings
from trackway.serving.user_code import FunctionServer
from trackway.system.waits import Waits, noted_in
from trackway.tools.app import create_app as tools_app
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.tools import OneShotRequest

SEEN: list[object] = []


def double(number: int) -> str:
    """Double a number.

    Args:
        number: Any whole number.
    """
    SEEN.append(number)
    if number < 0:
        raise ValueError(f"no negative number, please: {number}")
    return str(2 * number)


async def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "pred": solution_str}


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[Functions]:
    served = Functions([double], score, tmp_path / "functions-a.json")
    yield served
    served.close()


async def call(functions_file: Path, number: int):
    app = tools_app(ToolsSettings(functions_file=functions_file))
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        client = ToolsClient("http://tools", http)
        try:
            return await client.list(), await client.one_shot("double", OneShotRequest(arguments={"number": number}))
        except TrackwayError as error:  # the server's task group would wrap it
            return [], error


async def scored(functions_file: Path, text: str):
    app = reward_app(RewardSettings(functions_file=functions_file))
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        return await RewardClient("http://reward", http, CallPolicy(attempts=1)).score(
            ScoreRequest(data_source="any", solution_str=text, ground_truth="7")
        )


def test_a_function_is_a_tool_with_the_schema_of_its_signature(functions: Functions):
    schemas, result = run(call(functions.file, 21))

    assert [(schema.function.name, schema.function.description) for schema in schemas] == [
        ("double", "Double a number.")
    ]
    assert '"number":{"' in schemas[0].model_dump_json()
    assert not isinstance(result, TrackwayError)
    assert (result.text, SEEN[-1]) == ("42", 21)


def test_an_error_of_the_function_is_the_tools_and_is_shown_once_in_its_own_process(
    functions: Functions, caplog: pytest.LogCaptureFixture
):
    (_, first), (_, again) = (run(call(functions.file, -3)) for _ in range(2))

    assert isinstance(first, TrackwayError) and isinstance(again, TrackwayError)
    assert (first.code, again.code) == (ErrorCode.TOOL_FAILED, ErrorCode.TOOL_FAILED)
    assert "no negative number, please: -3" in first.message
    own = [record for record in caplog.records if record.threadName == "trackway-functions"]
    shown = [(record.levelno, logging.Formatter().format(record)) for record in own if "double" in record.getMessage()]
    failure = "tool 'double' failed in execute: ValueError: no negative number, please: -3"
    assert [(level, text.rpartition(" (")[0]) for level, text in shown] == [(logging.ERROR, failure)]


def test_a_reward_function_scores_every_data_source(functions: Functions):
    right, wrong = run(scored(functions.file, "7")), run(scored(functions.file, "no"))

    assert (right.score, right.components, right.answer) == (1.0, {"length": 1.0}, "7")
    assert (wrong.score, wrong.answer) == (0.0, "no")


def test_the_file_is_its_owners_and_the_token_opens_nothing_else(functions: Functions, tmp_path: Path):
    other = Functions([double], score, tmp_path / "functions-b.json")
    try:
        server, another = (FunctionServer.read(served.file) for served in (functions, other))
    finally:
        other.close()

    assert stat.S_IMODE(functions.file.stat().st_mode) == 0o600
    body = {"data_source": "any", "solution_str": "7", "ground_truth": "7"}
    statuses = [
        httpx.post(f"{server.url}/reward/score", json=body, headers=headers).status_code
        for headers in (
            {},
            {"authorization": f"Bearer {another.token.get_secret_value()}"},
            {"authorization": f"Bearer {server.token.get_secret_value()}"},
        )
    ]
    assert statuses == [401, 401, 200]


async def ask_tool(http: httpx.AsyncClient) -> object:
    client = ToolsClient("http://tools", http, CallPolicy(attempts=1))
    return await client.one_shot("double", OneShotRequest(arguments={"number": 21}))


async def ask_reward(http: httpx.AsyncClient) -> object:
    request = ScoreRequest(data_source="any", solution_str="7", ground_truth="7")
    return await RewardClient("http://reward", http, CallPolicy(attempts=1)).score(request)


@pytest.mark.parametrize(
    ("app_of", "ask"),
    [
        (lambda file: tools_app(ToolsSettings(functions_file=file)), ask_tool),
        (lambda file: reward_app(RewardSettings(functions_file=file)), ask_reward),
    ],
    ids=["tools", "reward"],
)
def test_an_ended_process_is_a_wait_by_name_and_then_an_error(
    app_of: Callable[[Path], FastAPI],
    ask: Callable[[httpx.AsyncClient], Coroutine[Any, Any, object]],
    functions: Functions,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("trackway.serving.user_code.OUTAGE_S", 2.0)
    monkeypatch.setattr("trackway.serving.user_code.ASK_AGAIN_S", 0.2)
    process = FunctionServer.read(functions.file).process
    notes: list[str] = []

    async def asked() -> TrackwayError | None:
        app = app_of(functions.file)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
            await ask(http)
            functions.close()
            with Waits()("a rollout", "its service") as waiting, noted_in([waiting]):
                asking = asyncio.create_task(ask(http))
                while not asking.done():
                    await asyncio.wait({asking}, timeout=0.05)
                    notes.append(waiting.problem)
            error = asking.exception()
            return error if isinstance(error, TrackwayError) else None

    error = run(asked())

    assert f"unavailable: waiting for the functions of {process}, 2 s more" in notes
    assert error is not None and error.code is ErrorCode.UNAVAILABLE
    assert f"expected an answer from the functions of {process} within 2 s, got none" in error.message


def test_without_the_file_the_services_name_the_remedy(tmp_path: Path):
    remedy, none = r"functions_file: expected the file .* start the run from Python", tmp_path / "none.json"
    with pytest.raises(ValueError, match=remedy):
        tools_app(ToolsSettings(functions_file=none))
    with pytest.raises(ValueError, match=remedy):
        reward_app(RewardSettings(functions_file=none))


def test_a_function_without_types_is_refused_before_anything_is_served(tmp_path: Path):
    def untyped(number): ...

    with pytest.raises(TypeError, match="untyped"):
        Functions([untyped], None, tmp_path / "functions-d.json")

    assert not (tmp_path / "functions-d.json").exists()
