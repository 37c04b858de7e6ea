"""The entity of a W&B API key, asked of a server that answers as W&B does."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from pydantic import SecretStr

from tests.serving import answered_by
from trackway.run_config import compose
from trackway.run_config.models import weave_project
from trackway.tracing import RolloutTraceConfig
from trackway.tracing.export.backends import default_entity, project_url
from trackway.tracing.settings import HOSTED_WEAVE
from trackway.wire.errors import TrackwayError

WEAVE = "actor_rollout_ref.rollout.trace.backend=weave"


class Account(BaseHTTPRequestHandler):
    asked: list[str]

    def do_POST(self) -> None:
        assert self.path == "/graphql"
        query = json.loads(self.rfile.read(int(self.headers["content-length"])))["query"]
        assert "defaultEntity { name }" in query
        key = base64.b64decode(self.headers["authorization"].removeprefix("Basic ")).decode().removeprefix("api:")
        self.asked.append(key)
        viewer = {"defaultEntity": {"name": f"team-of-{key}"}} if key != "unknown" else None
        body = json.dumps({"data": {"viewer": viewer}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    Account.asked = []
    with answered_by(ThreadingHTTPServer(("127.0.0.1", 0), Account)) as url:
        monkeypatch.setenv("WANDB_BASE_URL", f"{url}/")
        yield Account.asked


def test_a_project_without_an_entity_is_the_keys_own_and_is_asked_for_once(
    wandb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "mine")
    config = compose([WEAVE, "trainer.project_name=gsm8k"])
    assert [weave_project(config), weave_project(config)] == ["team-of-mine/gsm8k"] * 2
    RolloutTraceConfig.init("gsm8k", "e", "weave")
    assert RolloutTraceConfig.get_instance().target.weave_project == "team-of-mine/gsm8k"
    RolloutTraceConfig.reset()
    assert weave_project(config, SecretStr("yours")) == "team-of-yours/gsm8k"
    assert wandb == ["mine", "yours"]


def test_nobody_is_asked_where_the_entity_is_known_or_weave_is_not_wanted(
    wandb: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "mine")
    assert weave_project(compose([WEAVE, "trainer.project_name=me/p"])) == "me/p"
    assert weave_project(compose(["trainer.project_name=p"])) is None
    monkeypatch.setenv("WANDB_ENTITY", "us")
    assert weave_project(compose([WEAVE, "trainer.project_name=p"])) == "us/p"
    assert wandb == []


def test_a_key_that_nobody_knows_is_a_warning_and_the_old_remedy(
    wandb: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TrackwayError, match="got 'p'; add the entity, or set WANDB_"):
        weave_project(compose([WEAVE, "trainer.project_name=p"]), SecretStr("unknown"))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "W&B did not tell whose API key this is"
    ]


def test_a_server_that_is_not_there_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert default_entity(SecretStr("mine")) is None


@pytest.mark.parametrize(
    ("variables", "trace_server", "expected"),
    [
        ({}, HOSTED_WEAVE, "https://wandb.ai/me/a%20b"),
        ({}, "https://wandb.example.test/traces", "https://wandb.example.test/me/a%20b"),
        ({}, "http://127.0.0.1:9", None),
        ({"WANDB_BASE_URL": "https://api.example.test"}, "http://127.0.0.1:9", "https://app.example.test/me/a%20b"),
        ({"WANDB_APP_URL": "https://look.test/"}, HOSTED_WEAVE, "https://look.test/me/a%20b"),
    ],
)
def test_a_project_has_its_page_where_the_app_is_known(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], trace_server: str, expected: str | None
) -> None:
    for name in ("WANDB_BASE_URL", "WANDB_APP_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert project_url("me/a b", trace_server) == expected
