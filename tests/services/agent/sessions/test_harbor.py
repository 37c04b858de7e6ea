"""A task that Harbor runs itself, its agent terminus-2 against a session, its verifier's reward as the score."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interpreters import python_of
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_examples import FOLDER, LIMITS, OUTPUTS
from trackway.agent.settings import ExternalSettings

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900), pytest.mark.program("bwrap")]

CHECK = '#!/bin/bash\n[ "$(cat /app/sum.txt)" = 18 ] && echo 1 > /logs/verifier/reward.txt\n'
SECTIONS = "[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n[environment]\nbuild_timeout_sec = 60.0\n"


def write_task(folder: Path) -> None:
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "instruction.md").write_text("Write the sum of 9 and 9 into the file /app/sum.txt.\n")
    (folder / "task.toml").write_text(f'schema_version = "1.4"\n{SECTIONS}')
    (folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "tests" / "test.sh").write_text(CHECK)


def turn(*keystrokes: str) -> str:
    """What terminus-2 reads of a turn; without keystrokes the task is done."""
    commands = [{"keystrokes": keys, "duration": 0.5} for keys in keystrokes]
    body = {"analysis": "-", "plan": "-", "commands": commands, "task_complete": not keystrokes}
    return json.dumps(body) + END


def installed_harbor() -> Path:
    """The folder of Harbor's program, of the version that the example names."""
    uv = shutil.which("uv")
    assert uv is not None, "expected uv on the PATH, got none; run `make test-agents`"
    package = (FOLDER / "harbor_task.py").read_text().partition("uv tool install ")[2].split()[0]
    folder = OUTPUTS / "harbor"
    places = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    subprocess.run(
        [uv, "tool", "install", "--quiet", "--python", python_of("3.12") or "3.12", package],
        env={**os.environ, **places},
        check=True,
    )
    return folder / "bin"


async def test_a_task_run_by_harbor_becomes_a_trajectory_with_its_reward(
    serving: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "task")
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("HARBOR_ENV", "bubblewrap_environment:BubblewrapEnvironment")
    monkeypatch.setenv("PATH", f"{installed_harbor()}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "true")
    written = turn("echo 18 > /app/sum.txt\n")
    async with serving(ExternalSettings(function="harbor_task:run")) as services:
        trajectory = await services.say(
            *(written, turn(), turn()),
            agent_name="external",
            limits=LIMITS,
            sample__extra_info={"task": str(tmp_path / "task")},
        )
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    assert (len(trajectory.turns), trajectory.further_rows) == (3, [])
    assert sum(trajectory.response_mask) == len(encode(written)) + 2 * len(encode(turn()))
