"""An external agent in a container: the engine's command lines, exactly, and a program in the engine's place."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_session import ANSWER, COUNT
from tests.waiting import async_until
from trackway.agent.sessions.external import program_of
from trackway.agent.settings import ExternalSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.sessions import SessionAccess
from trackway.wire.trajectory import StopReason

SCRIPT = Path(__file__).parents[4] / "examples" / "agents" / "openai_script.py"
ACCESS = SessionAccess(session_id="s-1", base_url="http://127.0.0.1:9/v1", api_key="k", traceparent="00-1-2-01")
VARIABLES = ["OPENAI_BASE_URL", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "TRACEPARENT"]
ENGINE = """#!{python}
import json, os, signal, subprocess, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    *options, image = sys.argv[2 : sys.argv.index("my-agent") + 1]
    names = [option.removeprefix("--env=") for option in options if option.startswith("--env=")]
    given = {{name: os.environ[name] for name in names}}
    sys.exit(subprocess.call(sys.argv[sys.argv.index(image) + 1 :], env={{"PATH": os.environ["PATH"], **given}}))
"""
"""Runs a "container" as a process that sees the named variables only, and writes down how it was called."""


def container(command: list[str], **settings: object) -> ExternalSettings:
    return ExternalSettings.model_validate({"container": {"image": "my-agent", "command": command}, **settings})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a program called podman on the PATH."""
    program, log = tmp_path / "podman", tmp_path / "log"
    program.write_text(ENGINE.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_engine_gets_the_options_and_the_names_of_the_variables_but_no_key(engine: Path) -> None:
    settings = ExternalSettings.model_validate(
        {
            "container": {"image": "my-agent", "command": ["run", "me"], "network": "none", "options": ["--cpus=2"]},
            "environment": {"MODE": "fast"},
        }
    )
    program = program_of(settings, ACCESS)

    named = program.command[program.command.index("--network=none") + 1 : -4]
    assert program.command[:6] == [
        *(str(engine.with_name("podman")), "run", "--rm", "--interactive", "--init", "--name=trackway-s-1")
    ]
    assert program.command[6] == "--network=none"
    assert {"--env=MODE", *(f"--env={name}" for name in VARIABLES)} <= {*named}
    assert all(name.startswith("--env=") and name.count("=") == 1 for name in named)
    assert program.command[-4:] == ["--cpus=2", "my-agent", "run", "me"]
    assert program.cleanup == [str(engine.with_name("podman")), "rm", "--force", "trackway-s-1"]


def test_a_container_without_an_engine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrackwayError, match="expected podman or docker on the agent service's PATH") as refused:
        program_of(container([]), ACCESS)

    assert refused.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize(
    ("runs", "here"),
    [
        ({"command": ["agent"]}, True),
        ({"function": "module:name"}, True),
        ({"container": {"image": "my-agent"}}, True),
        ({"container": {"image": "my-agent", "network": "bridge"}}, False),
        ({"url": "http://127.0.0.1:9"}, False),
    ],
)
def test_only_agents_that_reach_this_host_are_given_the_replicas_own_port(runs: dict[str, object], here: bool) -> None:
    assert ExternalSettings.model_validate(runs).is_on_this_host is here


@pytest.mark.anyio
@pytest.mark.slow
async def test_an_agent_in_a_container_becomes_a_row(serving: Serve, engine: Path) -> None:
    async with serving(container([sys.executable, str(SCRIPT)])) as services:
        trajectory = await services.say(COUNT, ANSWER, agent_name="external")

    assert trajectory.error is None, trajectory.error.message
    assert (trajectory.log, len(trajectory.turns)) == ("", 2)
    assert (trajectory.stop_reason, [call[0] for call in calls(engine)]) == (StopReason.ANSWERED, ["run"])


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_container_past_the_time_limit_is_removed(serving: Serve, engine: Path) -> None:
    async with serving(container(["sleep", "600"])) as services:
        trajectory = await services.say(agent_name="external", limits__timeout_s=1.0)
        await async_until(lambda: len(calls(engine)) == 2)

    run, remove = calls(engine)
    assert trajectory.error is not None and trajectory.error.code is ErrorCode.DEADLINE_EXCEEDED
    [name] = [option.removeprefix("--name=") for option in run if option.startswith("--name=")]
    assert remove == ["rm", "--force", name]
