"""One deployment for the whole session: Ray, MLflow and the five services, exactly as `trackway up` starts them."""

from collections.abc import Callable, Iterator

import psutil
import pytest
from small_runs import small_run

from trackway.deploy import train
from trackway.deploy.settings import Deployment, UpSettings
from trackway.deploy.up import bring_up, take_down
from trackway.trainer.config import compose
from trackway.trainer.data import make_tiny
from trackway.wire.trainer import RunInfo

Train = Callable[..., RunInfo]


@pytest.fixture(scope="session")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    outputs = tmp_path_factory.mktemp("deployment") / "outputs"
    settings = UpSettings(outputs=outputs, port=0, dashboard_port=0, ray_port=0, mlflow_port=0)
    running = bring_up(settings, lambda name, state: print(f"{name}: {state}", flush=True))
    make_tiny(outputs / "data", train_size=64, test_size=16, seed=0)
    processes = [process for record in running.processes if (process := record.find())]
    family = [one for process in processes for one in [process, *process.children(recursive=True)]]
    yield running
    take_down(running)
    assert [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def started(deployment: Deployment) -> Train:
    """Start a small run of the demo's kind; every training trajectory is traced."""

    def start(name: str, steps: int, *overrides: str) -> RunInfo:
        words = small_run(deployment.outputs, name, steps, *overrides)
        return train.start_run(deployment, compose(words, config_name="tiny_demo"), name)

    return start
