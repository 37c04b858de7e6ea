"""What tests of the deployment share."""

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from benchmarks.sim_engine import SIM
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.waiting import until
from trackway.agent.app import create_app as agent_app
from trackway.agent.settings import AgentSettings
from trackway.clients.http_client import TOKEN
from trackway.deploy.bundled import TINY_MODEL
from trackway.deploy.deployment.record import Deployment
from trackway.reward.app import create_app as reward_app
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app as rollout_app
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import RunConfig, compose
from trackway.tools.app import create_app as tools_app
from trackway.tools.settings import ToolsSettings
from trackway.trainer.app import create_app as trainer_app
from trackway.trainer.run_state.folder import Owner, RunFolder
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import TrainerSettings
from trackway.wire.trainer import RunState

OPERATOR = "operator-0123456789abcdef"


@pytest.fixture
def collector() -> Iterator[None]:
    """A port changes the garbage collector of its process; this one is the suite's, whose imports stay frozen."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Elsewhere:
    """The five services behind one address, as Serve's proxy gives it."""

    def __init__(self, folder: Path) -> None:
        self.volume = folder / "volume"
        self.away: set[str] = set()
        """Services, or routes, that fail."""
        self.failing = 0
        """So many requests more fail, whatever they are for."""
        tokens = folder / "tokens.json"
        tokens.touch(mode=0o600)
        tokens.write_text(json.dumps({"ops": {"secret": OPERATOR, "scopes": ["admin"]}}))
        shared = {"auth": {"tokens_file": tokens}}
        model = TINY_MODEL
        self._apps: dict[str, ASGIApp] = {
            "rollout": rollout_app(RolloutSettings.model_validate({**shared, "model_path": model, "engine": SIM})),
            "agent": agent_app(AgentSettings.model_validate({**shared, "model_path": str(model)})),
            "tools": tools_app(ToolsSettings.model_validate(shared)),
            "reward": reward_app(RewardSettings.model_validate(shared)),
            "trainer": trainer_app(TrainerSettings.model_validate({**shared, "outputs_dir": str(self.volume)})),
        }
        config = uvicorn.Config(self, port=0, log_level="critical", ws="none", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].lstrip("/")
        away = [prefix for prefix in self.away if path.startswith(prefix)]
        name = path.split("/")[0]
        if away or self.failing or name not in self._apps:
            self.failing = max(0, self.failing - 1)
            answer = PlainTextResponse(f"no {away[0] if away else name} here", status_code=503)
            await answer(scope, receive, send)
            return
        await self._apps[name]({**scope, "root_path": f"/{name}"}, receive, send)

    def hold(self, name: str, config: RunConfig, *states: RunState) -> RunFolder:
        """A run of the trainer service that went through these states, held by this process as by a learner's."""
        made = RunFolder(self.volume / name)
        made.create(config, ServiceUrls.model_construct())
        made.write_owner(Owner.of(os.getpid()))
        for state in states:
            made.move(state)
        return made

    @property
    def url(self) -> str:
        """Where it answers."""
        return "http://{}:{}".format(*self._server.servers[0].sockets[0].getsockname())

    def start(self) -> None:
        """Return once it answers."""
        self._thread.start()
        until(lambda: self._server.started)

    def stop(self) -> None:
        """Return once it is gone."""
        self._server.should_exit = True
        self._thread.join(30)


@pytest.fixture(scope="module")
def five_services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    """Started once for each file of tests."""
    there = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    there.start()
    yield there
    there.stop()


@pytest.fixture
def elsewhere(five_services: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    """Running services with tokens, of which the environment has the operator's."""
    monkeypatch.setenv(TOKEN, OPERATOR)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    five_services.away, five_services.failing = set(), 0
    return five_services


@pytest.fixture
def there(elsewhere: Elsewhere, tmp_path: Path) -> Deployment:
    """A record of them."""
    outputs = tmp_path / "outputs"
    made = Deployment(base_url=elsewhere.url, dashboard_url="", mlflow_uri="", outputs=outputs, attached=True)
    made.save()
    return made


@pytest.fixture
def folder(elsewhere: Elsewhere, request: pytest.FixtureRequest) -> Iterator[RunFolder]:
    """A run that starts there, named like the test; it has ended when the test has. Parameters are overrides."""
    words = ["actor_rollout_ref.model.path=/models/tiny", *getattr(request, "param", [])]
    made = elsewhere.hold(request.node.originalname, compose(words, config_name="tiny_demo"))
    yield made
    if not made.ended():
        made.move(RunState.FAILED)
