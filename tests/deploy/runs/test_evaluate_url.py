"""`trackway evaluate URL`: a model behind another's server with OpenAI's chat completions."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TypeVar

import httpx
import pytest

from tests.services.agent.environments.openenv_server import EchoServer, echo_server
from tests.waiting import until
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import evaluate
from trackway.deploy.runs.evaluate import EvaluationRun, Options
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.system.process import UserError, free_port
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import StopReason, Trajectory

pytestmark = pytest.mark.slow

OUTPUTS = Path("outputs")
T = TypeVar("T")
KEY = "OTHERS_KEY"
VALUE = "sk-some-key-of-another"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(solution_str) % 3)
"""
TOOL = '''from trackway.tools import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
'''


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server in a process of its own with the tiny model, which wants a key."""
    folder = tmp_path_factory.mktemp("server")
    port = free_port()
    tokens = folder / "tokens"
    tokens.write_text(json.dumps({"evaluation": {"secret": VALUE}}))
    model = str(UpSettings.read().model_path)
    environment = {
        **os.environ,
        "TRACKWAY_MODEL_PATH": model,
        "TRACKWAY_WEIGHTS_URL": str(folder),
        "TRACKWAY_AUTH__TOKENS_FILE": str(tokens),
    }
    command = [sys.executable, "-m", "uvicorn", "--factory", "trackway.rollout.app:create_app", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        return httpx.get(f"{url}/ready", headers={"authorization": f"Bearer {VALUE}"}).is_success

    try:
        until(ready, ignored=httpx.TransportError)
        yield f"{url}/v1"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of both agents, in the working folder from now on; with the key in its variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY, VALUE)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "tool.py").write_text(TOOL)
    agents = ["single_turn_agent", "tool_agent"]
    lines = [
        {
            "data_source": "sums",
            "agent_name": agents[index % 2],
            "prompt": [{"role": "user", "content": f"What is {index} + {index}?"}],
            "reward_model": {"ground_truth": str(2 * index)},
            "extra_info": {"index": index},
        }
        for index in range(6)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def words(folder: Path) -> list[str]:
    return [
        f"custom_reward_function.path={folder / 'reward.py'}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder / 'tool.py'}",
        "data.max_response_length=24",
        "trainer.logger=[console]",
    ]


def prepared(what: str, rows: Path, *overrides: str, **options: object) -> EvaluationRun:
    chosen = Options(**{"rows": rows, "temperature": 0.0, **options})
    return evaluate.prepare(what, chosen, [*words(rows.parent), *overrides], None, "default", OUTPUTS)


def finished(
    run: EvaluationRun, progress: Callable[[Sequence[Trajectory], int], None] = lambda rollouts, left: None
) -> Evaluation:
    findings, read = run.check(lambda name, state: None)
    findings.refuse()
    assert read is not None
    return run.run(read, lambda name, state: None, progress)


def evaluated(what: str, rows: Path, **options: object) -> Evaluation:
    return finished(prepared(what, rows, **options))


def test_a_model_behind_a_url_has_the_scores_and_lengths_of_its_folder(server: str, rows: Path):
    local = evaluated(str(UpSettings.read().model_path), rows, name="local")
    remote = evaluated(server, rows, name="remote", api_key_env=KEY)

    assert local.summary is not None and remote.summary is not None
    assert (remote.summary.rollouts, remote.summary.failed) == (6, 0)
    assert remote.summary.response_tokens == local.summary.response_tokens > 0
    here, there = (EvaluationStore(OUTPUTS / name) for name in ("local", "remote"))
    assert [found.turns[0].messages[0].content for found in there.trajectories()] == [
        found.turns[0].messages[0].content for found in here.trajectories()
    ]
    compared = there.compared(here)
    assert compared is not None and (compared.score.tasks, compared.score.value) == (6, 0.0)
    assert all(found.response_ids == [] and found.usage is not None for found in there.trajectories())
    written = [file.read_bytes() for file in (OUTPUTS / "remote").rglob("*") if file.is_file()]
    assert written and not any(VALUE.encode() in content for content in written)


def test_a_wrong_key_and_a_wrong_model_are_refused_before_the_rollouts(
    server: str, rows: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(UserError, match=r"--model: expected a model of http.* \(policy\), got nothing; name one"):
        evaluated(server, rows, model="nothing", api_key_env=KEY)
    monkeypatch.setenv(KEY, "sk-a-wrong-key-of-another")
    with pytest.raises(
        TrackwayError, match=rf"expected an accepted API key, got the one in {KEY} \(HTTP 401\)"
    ) as wrong:
        evaluated(server, rows, api_key_env=KEY)
    assert wrong.value.code is ErrorCode.UNAUTHORIZED and "sk-a" not in wrong.value.message
    monkeypatch.delenv(KEY)
    with pytest.raises(TrackwayError, match=f"expected the API key in the variable {KEY}, got none; export it"):
        evaluated(server, rows, api_key_env=KEY)
    with pytest.raises(UserError, match="export the key and give the variable's name") as key:
        evaluated(server, rows, api_key_env=VALUE)
    assert VALUE not in str(key.value)
    assert not OUTPUTS.exists()


def test_a_server_that_is_gone_is_named_before_the_rollouts(rows: Path):
    with pytest.raises(TrackwayError, match=r"http://127.0.0.1:9/v1/models: no answer .*; correct the URL, or start"):
        evaluated("http://127.0.0.1:9/v1", rows, api_key_env=KEY)


@contextmanager
def answering(
    answer: Callable[[dict], tuple[int, dict[str, str], dict]], models: Sequence[str] = ("m",), unlisted: int = 404
) -> Iterator[str]:
    """The URL of a server with these models, whose chat completions are what `answer` returns for a body.

    Without models it answers `unlisted` when asked for the list.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            listed = {"data": [{"id": model} for model in models]}
            self.reply(*((200, {}, listed) if models else (unlisted, {}, {"detail": "no list"})))

        def do_POST(self) -> None:
            self.reply(*answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def reply(self, status: int, headers: dict[str, str], body: dict) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1"
    finally:
        http.shutdown()
        http.server_close()


def said(text: str | None, *calls: dict) -> tuple[int, dict[str, str], dict]:
    """A message of the model, after 10 tokens of prompt for each message."""
    message = {"role": "assistant", "content": text, "tool_calls": [{"id": "x", "function": call} for call in calls]}
    usage = {"prompt_tokens": 10, "completion_tokens": 3}
    return 200, {}, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def test_tools_are_offered_and_answered_and_a_full_server_is_asked_again(rows: Path):
    bodies = list[dict]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        bodies.append(body)
        if len(bodies) == 1:
            return 429, {"retry-after": "0"}, {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
        if any(message["role"] == "tool" for message in body["messages"]) or "tools" not in body:
            return said("ok")
        calls = [{"name": "add", "arguments": '{"a": 1, "b": 2}'}, {"name": "add", "arguments": "{"}]
        return said(None, *calls)

    with answering(answer) as url:
        evaluation = evaluated(url, rows, name="asked", limit=2)

    assert evaluation.summary is not None
    assert (evaluation.summary.rollouts, evaluation.summary.failed, evaluation.summary.tool_calls) == (2, 0, 0.5)
    _, told = EvaluationStore(OUTPUTS / "asked").trajectories()
    assert told.stop_reason is StopReason.ANSWERED and len(told.turns) == 2
    assert told.turns[0].messages[1].content == "3"
    assert told.usage is not None and told.usage.model_dump() == {
        "prompt_tokens": 10,
        "response_tokens": 3,
        "generated_tokens": 6,
    }
    last = next(body for body in bodies if body["messages"][-1]["role"] == "tool")
    assert [call["function"]["arguments"] for call in last["messages"][1]["tool_calls"]] == ['{"a": 1, "b": 2}', "{}"]
    assert [tool["function"]["name"] for tool in last["tools"]] == ["add"]


def test_rollouts_that_a_server_refuses_leave_n(rows: Path):
    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        if "tools" in body:
            return 404, {}, {"error": {"message": "The model `m` does not exist", "code": "model_not_found"}}
        return said("ok")

    with answering(answer) as url:
        evaluation = evaluated(url, rows, name="refused")

    assert evaluation.summary is not None
    assert (evaluation.summary.rollouts, evaluation.summary.errors) == (3, {"model_not_found": 3})
    errors = [found.error for found in EvaluationStore(OUTPUTS / "refused").trajectories() if found.error]
    assert errors[0].message.startswith(f"{url}: expected an answer of model 'm', got ")
    assert errors[0].message.endswith("(HTTP 404); correct --model or the URL")


@pytest.mark.parametrize("status", [404, 500])  # transformers serve answers 500 without a cache
def test_a_model_of_a_server_that_lists_none_is_asked_for_a_few_tokens_first(rows: Path, status: int):
    bodies = list[dict]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        bodies.append(body)
        if body["model"] != "m":
            return 404, {}, {"error": {"message": "no such model"}}
        return said("ok")

    with answering(answer, models=(), unlisted=status) as url:
        with pytest.raises(UserError, match=rf"{url}/models, got none; name the model with --model"):
            evaluated(url, rows)
        with pytest.raises(
            TrackwayError, match=r"'other', got .*no such model.* \(HTTP 404\); correct --model or the URL"
        ):
            evaluated(url, rows, model="other")
        assert not OUTPUTS.exists()
        evaluation = evaluated(url, rows, model="m", name="unlisted", limit=1)

    assert evaluation.summary is not None
    assert (evaluation.summary.rollouts, evaluation.summary.failed) == (1, 0)
    assert [(body["model"], body["messages"][0]["content"], body["max_completion_tokens"]) for body in bodies] == [
        ("other", "Hello", 16),
        ("m", "Hello", 16),
        ("m", "What is 0 + 0?", 24),
    ]
    with answering(answer, models=["a", "b"]) as url:
        with pytest.raises(UserError, match=r"--model: expected a model of http.* \(a, b\), got other; name one"):
            evaluated(url, rows, model="other")
        assert prepared(url, rows, model="m").evaluation.model == "m"  # not listed, yet it answers


def test_a_seed_is_sent_unless_the_answer_is_greedy_or_no_seed_is_wanted(rows: Path):
    bodies = list[dict]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        bodies.append(body)
        return said("ok")

    def seeds(**options: object) -> list[int | None]:
        bodies.clear()
        with answering(answer) as url:
            evaluated(url, rows, n=2, limit=1, **options)
        return [body.get("seed") for body in bodies]

    sampled = seeds(temperature=0.5, name="sampled")
    assert len({*sampled}) == 2 and None not in sampled
    assert seeds(temperature=0.5, name="unseeded", no_seed=True) == [None, None]
    assert seeds(temperature=0.0, name="greedy") == [None, None]
    with pytest.raises(UserError, match="--no-seed: expected a URL to evaluate, got 'm'; leave them out"):
        prepared("m", rows, no_seed=True)


def test_what_needs_token_ids_is_refused_once_before_the_rollouts(rows: Path):
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    lines[4]["agent_name"] = "external"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    bodies = list[dict]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        bodies.append(body)
        return said("ok")

    with answering(answer) as url:
        run = prepared(url, rows, "trackway.max_tool_response_tokens=8", name="tokens")
        findings, _ = run.check(lambda name, state: None)
        others, _ = prepared(url, rows, name="others", limit=4).check(lambda name, state: None)

    assert others.wrong == []
    assert [fault.partition(";")[0] for fault in findings.wrong] == [
        "agent_name: expected single_turn_agent, tool_agent, a subclass or an environment for a URL, got external, "
        "which needs token ids",
        "trackway.max_tool_response_tokens: expected null for a URL, whose tokens are unknown",
    ]
    assert (bodies, OUTPUTS.exists()) == ([], False)


def test_a_cut_evaluation_of_a_url_continues_with_the_rows_that_are_left(rows: Path):
    asked = list[str]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        asked.append(body["messages"][0]["content"])
        assert "seed" not in body
        return said(f"answer {len(asked)}")

    def stop(rollouts: Sequence[Trajectory], left: int) -> None:
        if left == 4:
            raise KeyboardInterrupt

    serial = "trackway.max_inflight_groups=1"
    with answering(answer) as url:
        with pytest.raises(BaseException):  # noqa: B017 - a KeyboardInterrupt, or the group that holds it
            finished(prepared(url, rows, serial, name="cut", temperature=0.5, no_seed=True), stop)
        kept = EvaluationStore(OUTPUTS / "cut").trajectories()
        before = [*asked]
        evaluation = finished(evaluate.resumed("cut", OUTPUTS))

    assert [found.tags.sample_index for found in kept] == [0, 1]
    assert sorted(asked[len(before) :]) == [f"What is {index} + {index}?" for index in range(2, 6)]
    assert evaluation.summary is not None
    assert (evaluation.summary.tasks, evaluation.summary.rollouts, evaluation.summary.failed) == (6, 6, 0)
    store = EvaluationStore(OUTPUTS / "cut")
    assert store.trajectories()[:2] == kept
    said_by_row = [found.turns[0].messages[0].content for found in store.trajectories()]
    assert len({*said_by_row}) == 6


def test_rollouts_of_a_url_are_scored_again_without_the_server(rows: Path):
    (rows.parent / "length.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': len(solution_str) + int(ground_truth) / 100, 'turns': len(extra_info['turns'])}\n"
    )

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        return said("x" * int(body["messages"][0]["content"].split()[2]))

    with answering(answer) as url:
        first = evaluated(url, rows, name="first")
    again = evaluate.rescored(
        "first", [f"custom_reward_function.path={rows.parent / 'length.py'}"], None, OUTPUTS, lambda name, state: None
    )

    assert first.summary is not None and first.summary.score is not None
    assert first.summary.score.value == pytest.approx((0 + 1 + 2 + 0 + 1 + 2) / 6)
    rewards = [found.reward for found in EvaluationStore(OUTPUTS / "first-rescored").trajectories()]
    assert [(reward and reward.score, reward and reward.components["turns"]) for reward in rewards] == [
        (index + 2 * index / 100, 1.0) for index in range(6)
    ]
    assert again.summary is not None and again.summary.score is not None
    assert again.summary.score.value == pytest.approx(2.55)
    assert (again.summary.response_tokens, again.endpoint) == (first.summary.response_tokens, first.endpoint)


@contextmanager
def environment() -> Iterator[EchoServer]:
    """OpenEnv's echo environment, on an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(coroutine: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(30)

    server = echo_server()
    try:
        yield do(server.__aenter__())
    finally:
        do(server.__aexit__(None, None, None))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_an_environment_is_played_by_a_model_behind_a_url(rows: Path, monkeypatch: pytest.MonkeyPatch):
    row = json.loads(rows.read_text().splitlines()[0])
    row |= {"agent_name": "environment:echo", "extra_info": {"env_kwargs": {"seed": 3}, "index": 7}}
    rows.write_text(json.dumps(row) + "\n")
    bodies = list[dict]()

    def answer(body: dict) -> tuple[int, dict[str, str], dict]:
        bodies.append(body)
        if len(bodies) == 2:
            return said("done")
        return said(None, {"name": "echo", "arguments": '{"message": "hi"}'})

    with environment() as echo, answering(answer) as url:
        setting = {"echo": {"protocol": "openenv", "url": echo.url}}
        monkeypatch.setenv("TRACKWAY_ENVIRONMENTS", json.dumps(setting))
        evaluation = evaluated(url, rows, name="played")

    [played] = EvaluationStore(OUTPUTS / "played").trajectories()
    assert (played.error, played.stop_reason) == (None, StopReason.ANSWERED)
    assert played.reward is not None
    assert (played.reward.score, played.reward.turn_scores) == (0.25, [0.25, 0.0])
    assert evaluation.summary is not None and evaluation.summary.score is not None
    assert (evaluation.summary.score.value, evaluation.summary.tool_calls) == (0.25, 1.0)
    assert [tool["function"]["name"] for tool in bodies[0]["tools"]] == ["echo"]
    seen = '{"echoed_message": "Ready!", "message_length": 0}', '{"echoed_message": "hi", "message_length": 2}'
    assert bodies[0]["messages"][0]["content"].endswith(seen[0])
    assert bodies[1]["messages"][-1]["content"] == seen[1]
    assert (echo.resets, echo.closed) == ([{"episode_id": played.id, "seed": 3}], ["close"])
