"""One deployment for the whole session: Ray, MLflow and the five services, exactly as `trackway up` starts them.

As for a run with a reward model, a sixth application serves one, which scores the rows of a data source of its own. It
all has tokens, so that every test here is one of them too; services that a test adds have none.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.access_tokens import OPERATOR, tokens_file
from tests.e2e.classified import with_reward_model
from tests.e2e.small_runs import small_run
from tests.install.test_install import built as built
from tests.install.test_install import wheel as wheel
from tests.weave.weave_process import weave_url as weave_url
from trackway.clients.http_client import TOKEN
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.local.up import bring_up, take_down
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.system import free_port
from trackway.trainer.data import make_tiny
from trackway.wire.trainer import RunInfo

Train = Callable[..., RunInfo]


@pytest.fixture(scope="session")
def teacher_port() -> int:
    """The port of the agent service's teacher `elsewhere`."""
    return free_port()


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory, teacher_port: int) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    outputs, tokens = folder / "outputs", tokens_file(folder)
    settings = UpSettings(outputs=outputs, tokens_file=tokens, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN, OPERATOR)
        environment.setenv("TRACKWAY_TEACHERS", json.dumps({"elsewhere": f"http://127.0.0.1:{teacher_port}"}))
        environment.setenv(
            "PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep
        )  # for benchmarks.sim_engine
        config = with_reward_model(folder / "classifier")
        running = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True), config)
    make_tiny(outputs / "data", train_size=64, test_size=16, seed=0)
    yield running
    roots = [process for record in running.processes if (process := record.find())]
    family = [process for root in roots for process in [root, *root.children(recursive=True)]]
    take_down(running)
    remaining = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert len(roots) == len(running.processes) and remaining == []


@pytest.fixture(scope="module", autouse=True)
def token() -> Iterator[None]:
    """Tests call as operators; other tests of the session have no token."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(TOKEN, OPERATOR)
        yield


@pytest.fixture(scope="module")
def started(deployment: Deployment) -> Train:
    """Start a small run of the demo's kind; every training trajectory is traced."""

    def start(name: str, steps: int, *overrides: str) -> RunInfo:
        words = small_run(deployment.outputs, name, steps, *overrides)
        return RunSession(deployment).start(compose(words, config_name="tiny_demo"), name)

    return start
