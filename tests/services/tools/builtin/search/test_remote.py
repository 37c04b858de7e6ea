"""`search` over a retriever that runs elsewhere: our own, a stranger's, one that is away, busy or no retriever."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import JsonValue

from tests.serving import served
from tests.time_limits import ENDS_SOON
from trackway.clients import close_shared_http
from trackway.tools.app import create_app
from trackway.tools.builtin.search import SearchTool
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

QUERIES: dict[str, JsonValue] = {"query_list": ["capital of France"]}
PARIS = '"Paris"\nParis is the capital of France.'


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_shared_http()


class Stranger:
    """A retriever that is not ours: answers what it was told to, one after another, and keeps what it was sent."""

    def __init__(self, *answers: Response) -> None:
        self.app = FastAPI()
        self.asked: list[Request] = []
        self.bodies: list[object] = []
        self._answers = [*answers]
        self.app.post("/retrieve")(self.answer)

    async def answer(self, request: Request) -> Response:
        self.asked.append(request)
        self.bodies.append(await request.json())
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def json_answer(value: object) -> Response:
    return Response(json.dumps(value), media_type="application/json")


def tool_for(url: str, **config: float | str) -> SearchTool:
    return SearchTool.default({"retrieval_service_url": f"{url}/retrieve", **config})


async def failure(tool: SearchTool) -> TrackwayError:
    with pytest.raises(TrackwayError) as caught:
        await tool.execute("id", QUERIES)
    return caught.value


def our_server(documents: Path) -> FastAPI:
    config = {"search": {"documents": str(documents)}}
    return create_app(ToolsSettings.model_validate({"tools": ["search"], "tool_config": config}))


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rows = [{"id": "1", "contents": PARIS}, {"id": "2", "contents": '"Rome"\nRome is the capital of Italy.'}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


async def test_our_own_server_is_a_retriever_and_says_what_the_embedded_search_says(documents: Path) -> None:
    embedded = SearchTool.default({"documents": str(documents)})
    await embedded.start()
    async with served(our_server(documents)) as url:
        remote = await tool_for(url).execute("id", QUERIES)

    assert remote == await embedded.execute("id", QUERIES)
    assert json.loads(remote.text)["result"].startswith('Doc 1 (Title: "Paris")\nParis is the capital of France.')


@pytest.mark.parametrize("scores", [True, False])
async def test_the_retriever_api_answers_recipes_in_their_own_shape(running, documents: Path, scores: bool) -> None:
    async with running(our_server(documents)) as http:
        body = {"queries": ["France", "nowhere"], "topk": 1, "return_scores": scores}
        answer = (await http.post("/retrieve", json=body)).json()

    ((found,), nothing) = answer["result"]
    document = found["document"] if scores else found
    assert (document, nothing) == ({"id": "1", "contents": PARIS}, [])
    assert not scores or found["score"] > 0


async def test_there_is_no_retriever_route_without_documents_here(running) -> None:
    config = {"search": {"retrieval_service_url": "http://127.0.0.1:9/retrieve"}}
    settings = ToolsSettings.model_validate({"tools": ["search"], "tool_config": config})
    for app in (create_app(settings), create_app()):
        async with running(app) as http:
            assert (await http.post("/retrieve", json={"queries": []})).status_code == 404


async def test_verls_request_is_sent_and_no_token_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKWAY_TOKEN", "our-token-0123456789")
    stranger = Stranger(json_answer({"result": [[{"document": {"id": 5, "contents": PARIS}, "score": 0.5}]]}))
    async with served(stranger.app) as url:
        result = await tool_for(url, topk=7).execute("id", QUERIES)
        await tool_for(url, token="its-own-token").execute("id", QUERIES)

    assert stranger.bodies[0] == {"queries": ["capital of France"], "topk": 7, "return_scores": True}
    assert [request.headers.get("authorization") for request in stranger.asked] == [None, "Bearer its-own-token"]
    assert json.loads(result.text) == {"result": 'Doc 1 (Title: "Paris")\nParis is the capital of France.'}


@pytest.mark.parametrize("item", [{"contents": PARIS}, {"document": {"title": "Paris", "text": PARIS[8:]}}])
async def test_other_shapes_of_a_document_are_read_too(item: object) -> None:
    async with served(Stranger(json_answer({"result": [[item]]})).app) as url:
        result = await tool_for(url).execute("id", QUERIES)

    assert json.loads(result.text) == {"result": 'Doc 1 (Title: "Paris")\nParis is the capital of France.'}


async def test_a_busy_or_failing_retriever_is_asked_again() -> None:
    good = json_answer({"result": [[{"contents": PARIS}]]})
    stranger = Stranger(Response("busy", 503), Response("slow down", 429), good)
    async with served(stranger.app) as url:
        result = await tool_for(url).execute("id", QUERIES)

    assert (len(stranger.asked), result.metrics["total_results"]) == (3, 1.0)


async def test_a_retriever_that_stays_away_is_no_fault_of_the_model() -> None:
    error = await failure(tool_for("http://127.0.0.1:9", timeout=20.0))

    assert (error.code, error.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert error.message.startswith("search: the retriever http://127.0.0.1:9/retrieve did not answer: ")


@ENDS_SOON
async def test_a_silent_retriever_is_given_up_in_time() -> None:
    asked, over = 0, asyncio.Event()

    async def silent() -> None:
        nonlocal asked
        asked += 1
        await over.wait()

    app = FastAPI()
    app.post("/retrieve")(silent)
    async with served(app) as url:
        error = await failure(tool_for(url, timeout=0.5))
        over.set()

    assert (error.code, asked) == (ErrorCode.TOOL_TIMEOUT, 1)


@pytest.mark.parametrize(
    "answer",
    [
        json_answer({"result": []}),
        json_answer({"results": [[]]}),
        json_answer({"result": [[{"body": "x"}]]}),
        Response("no JSON"),
        Response("not found", 404),
        Response("unprocessable", 422),
    ],
    ids=["too few lists", "another key", "no contents", "no JSON", "not found", "refused"],
)
async def test_what_is_no_retriever_is_said_once_and_is_the_tools_failure(answer: Response) -> None:
    stranger = Stranger(answer)
    async with served(stranger.app) as url:
        error = await failure(tool_for(url))

    assert (error.code, len(stranger.asked)) == (ErrorCode.TOOL_FAILED, 1)
    assert f"{url}/retrieve" in error.message


async def test_only_so_many_requests_are_out_at_once() -> None:
    running, most = 0, 0

    async def answer() -> dict[str, object]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return {"result": [[]]}

    app = FastAPI()
    app.post("/retrieve")(answer)
    async with served(app) as url:
        tool = tool_for(url, rate_limit=2)
        await asyncio.gather(*(tool.execute("id", QUERIES) for _ in range(8)))

    assert most == 2


async def test_a_whole_batch_of_queries_is_answered_in_order(running, documents: Path) -> None:
    queries = ["France", "Italy"] * 100
    async with running(our_server(documents)) as http:
        answer: httpx.Response = await http.post("/retrieve", json={"queries": queries, "topk": 1})

    assert [found["id"] for (found,) in answer.json()["result"]] == ["1", "2"] * 100


async def test_nothing_is_logged_of_the_token(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        tool = tool_for("http://127.0.0.1:9", token="its-own-token", timeout=1.0)
        error = await failure(tool)

    assert "its-own-token" not in caplog.text + str(error) + repr(tool._config)
