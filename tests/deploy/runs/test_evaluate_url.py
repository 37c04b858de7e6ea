"""`trackway evaluate URL`: a model behind another's server with OpenAI's chat completions."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.waiting import until
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs import evaluate
from trackway.deploy.runs.evaluate import Options
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.system.user_error import UserError
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import StopReason

pytestmark = pytest.mark.slow

OUTPUTS = Path("outputs")
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
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


def evaluated(what: str, rows: Path, **options: object) -> Evaluation:
    chosen = Options(**{"rows": rows, "temperature": 0.0, **options})
    prepared = evaluate.prepare(what, chosen, words(rows.parent), None, "default", OUTPUTS)
    findings, read = prepared.check(lambda name, state: None)
    findings.refuse()
    assert read is not None
    return prepared.run(read, lambda name, state: None, lambda rollouts, left: None)


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
def answering(answer: Callable[[dict], tuple[int, dict[str, str], dict]]) -> Iterator[str]:
    """The URL of a server with the model `m`, whose chat completions are what `answer` returns for a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {}, {"data": [{"id": "m"}]})

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
