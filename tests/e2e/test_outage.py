"""The promise: a trace backend that is away costs a run neither a step nor a span."""

import contextlib
from collections.abc import Iterator

import psutil
import pytest
from mlflow import MlflowClient

from tests.chaos.run_invariants import mlflow_differences
from tests.e2e.test_training import quiet, step_of, trajectories_of, whole
from tests.waiting import until
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.runs.session import RunSession
from trackway.wire.trainer import RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@contextlib.contextmanager
def away(deployment: Deployment) -> Iterator[None]:
    """MLflow's processes stand still: whoever asks it gets no answer."""
    [server] = [process for record in deployment.processes if record.name == "mlflow" and (process := record.find())]
    family = [server, *server.children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        yield
    finally:
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def test_mlflow_standing_still_stops_no_step_and_loses_no_trace(deployment: Deployment, started) -> None:
    name = started("outage", 8, "trackway.trace_prompts_per_step=2").run
    until(lambda: step_of(deployment, name) >= 1)
    with away(deployment):
        first = step_of(deployment, name)
        until(lambda: step_of(deployment, name) >= min(8, first + 4))
    info = RunSession(deployment).follow(name, quiet)
    assert (info.state, info.step) == (RunState.FINISHED, 8)
    made = trajectories_of(info)
    traced = {f"tr-{trajectory.trace_id}": trajectory for trajectory in made if trajectory.trace_id}
    assert [trajectory.error for trajectory in made if trajectory.error] == [] and len(traced) == 8 * 8 + 2 + 2
    assert info.experiment_id is not None
    experiment = info.experiment_id
    found = until(lambda: whole(deployment, experiment, traced))
    assert found.keys() == traced.keys()
    client = MlflowClient(tracking_uri=deployment.mlflow_uri)
    until(lambda: not mlflow_differences(client, info))
