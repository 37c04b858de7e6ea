"""A run's own process on other packages than the service that started it must not train."""

import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from trackway.run_config import RunConfig
from trackway.tracing import TracingSettings
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.heartbeat import EXIT_FAILED
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.settings import handed_over
from trackway.wire.trainer import RunState

NOWHERE = ServiceUrls(agent_url="http://here", tools_url="http://here", weights_url="w")


@pytest.mark.slow
def test_a_learner_of_another_environment_fails_with_both_sides_and_the_remedy(
    tmp_path: Path, other_environment: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create(RunConfig(), NOWHERE)
    command = [other_environment, "-m", "trackway.trainer.worker", folder.path]

    ended = subprocess.run(command, env={**os.environ, **handed_over(TracingSettings())}, timeout=120, check=False)

    info = folder.info()
    assert (ended.returncode, info.state) == (EXIT_FAILED, RunState.FAILED)
    assert "the learner runs on another installation than the trainer service: Python: expected" in info.message
    assert f"pydantic: expected {version('pydantic')}, got 2.0.1; start both from one environment" in info.message
