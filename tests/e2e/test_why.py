"""The promise: a part that stands still is named by `trackway why`, and the run goes on once it moves again."""

import contextlib
import re
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.small_runs import small_run
from tests.e2e.test_training import quiet, step_of
from tests.waiting import until
from trackway.deploy.commands.why import reasons
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import service_statuses
from trackway.deploy.runs.found import find_run
from trackway.deploy.runs.session import RunSession
from trackway.run_config import compose
from trackway.wire.trainer import RunInfo, RunState

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 400
"""More than the run does: the test stops it."""
NAMED = {
    "tools": r"rollout \d+/\d+/\d waits for tool calculator, \d+ s of \d+ s: replica \S+",
    "rollout": r"rollout \d+/\d+/\d waits for the rollout service, turn \d, \d+ s of \d+ s: replica \S+",
    "reward": r"rollout \d+/\d+/\d waits for the reward service, \d+ s of \d+ s: replica \S+",
    "agent": r"group \d+/\d+ waits for the agent service, \d+ s of 1800 s: \d of 4 rollouts have ended",
}
"""Service that stands still -> the last line of the chain."""


@contextlib.contextmanager
def standing_still(deployment: Deployment, service: str) -> Iterator[str]:
    """Suspend the only replica of the service for the duration of the block; yields its name."""
    [status] = [status for status in service_statuses(deployment) if status.service == service]
    [replica] = status.replicas
    process = psutil.Process(replica.health.pid)
    process.suspend()
    try:
        yield replica.health.replica
    finally:
        process.resume()


@pytest.fixture(scope="module")
def run(deployment: Deployment) -> Iterator[str]:
    """A run that is stopped once each service has stood still."""
    words = small_run(deployment.outputs, "why", STEPS, "trackway.trace_prompts_per_step=0", "trainer.test_freq=-1")
    name = RunSession(deployment).start(compose(words, config_name="tiny_demo"), "why").run
    yield name
    assert RunSession(deployment).stop(name, quiet).state is RunState.STOPPED


@pytest.mark.parametrize("service", list(NAMED))
def test_a_service_that_stands_still_is_named_with_its_replica_and_deadline(
    deployment: Deployment, run: str, service: str
) -> None:
    def info() -> RunInfo:
        return find_run(deployment.outputs, run).info

    before = until(lambda: step_of(deployment, run) or None)
    with standing_still(deployment, service) as replica:
        lines = until(lambda: named(info(), NAMED[service]), state=lambda: [*reasons(info(), time.time())])
    until(lambda: step_of(deployment, run) > before + 1)

    assert lines[0].startswith("  the run waits for the rollouts of step ")
    assert service == "agent" or replica in lines[-1]


def named(info: RunInfo, pattern: str) -> list[str] | None:
    """The chain of the first wait that matches, from the run's own; None when there is none."""
    lines = list(reasons(info, time.time()))
    found = [place for place, line in enumerate(lines) if re.search(pattern, line)]
    return [lines[1], lines[found[0]]] if found else None
