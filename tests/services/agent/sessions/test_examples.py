"""The agents of examples/agents as they are, each with its own packages: their calls become the tool agent's row."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.agent.agent_services import call
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.external_services import Serve
from tests.services.agent.sessions.test_session import ANSWER, ARGUMENTS, COUNT
from trackway.agent.settings import ExternalSettings
from trackway.learner.filtering import TrainStatus, train_status
from trackway.wire.trajectory import StopReason

pytestmark = [pytest.mark.anyio, pytest.mark.agents, pytest.mark.timeout(900)]

FOLDER = Path(__file__).parents[4] / "examples" / "agents"
OUTPUTS = FOLDER.parents[1] / "outputs"
NODE = OUTPUTS / "node-agents"
LIMITS = {"max_prompt_length": 65_536, "max_response_length": 65_536, "timeout_s": 120.0}
BEGIN = "<tool_call>"


def installed(name: str) -> ExternalSettings:
    """The example as a program, its packages installed."""
    if "# /// script" not in (FOLDER / name).read_text():
        return ExternalSettings(command=[sys.executable, str(FOLDER / name)])
    uv = shutil.which("uv")
    assert uv is not None, "expected uv on the PATH, got none; run `make test-agents`"
    subprocess.run([uv, "sync", "--quiet", "--script", FOLDER / name], check=True)
    own = [variable for variable in os.environ if variable.startswith("UV_")]
    return ExternalSettings(command=[uv, "run", "--quiet", "--offline", str(FOLDER / name)], variables=own)


def installed_by_npm(name: str) -> ExternalSettings:
    """The example of a command-line agent as a program, the version that it names installed."""
    npm = shutil.which("npm")
    assert npm is not None, "expected npm on the PATH, got none; install Node.js"
    package = (FOLDER / name).read_text().partition("npm install -g ")[2].split()[0]
    subprocess.run([npm, "install", "--silent", "--prefer-offline", "--prefix", NODE, package], check=True)
    programs = NODE / "node_modules" / ".bin"
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return ExternalSettings(command=[sys.executable, str(FOLDER / name)], environment={"PATH": path})


@pytest.mark.parametrize(
    "name",
    [
        "agent_framework_agent.py",
        "anthropic_sdk.py",
        "langgraph_agent.py",
        "openai_agents_sdk.py",
        "pydantic_ai_agent.py",
    ],
)
async def test_an_agent_of_two_calls_becomes_one_row(serving: Serve, name: str) -> None:
    async with serving(installed(name)) as services:
        trajectory = await services.say(COUNT, ANSWER, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    assert trajectory.response_ids[: len(encode(COUNT))] == encode(COUNT)
    assert trajectory.response_ids[-len(encode(ANSWER)) :] == encode(ANSWER)
    assert sum(trajectory.response_mask) == len(encode(COUNT)) + len(encode(ANSWER))
    between = trajectory.response_ids[len(encode(COUNT)) : -len(encode(ANSWER))]
    assert between == encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
    assert (trajectory.stop_reason, trajectory.num_turns) == (StopReason.ANSWERED, 4)


@pytest.mark.parametrize(
    "name",
    [
        "agent_framework_agent.py",
        "anthropic_sdk.py",
        "langgraph_agent.py",
        "openai_agents_sdk.py",
        "openai_script.py",
        "pydantic_ai_agent.py",
    ],
)
async def test_what_the_model_does_wrong_is_no_failure_of_its_agent(serving: Serve, name: str) -> None:
    wrong = [call("calculator", '{"expression": 5}'), call("calculator"), call("abacus", ARGUMENTS)]
    endless = [call("calculator", ARGUMENTS)] * 50
    async with serving(installed(name)) as services:
        encode = services.model.encode
        for script, least in ((wrong, 3), (endless, 4)):
            said = [*(text + END for text in script), ANSWER]
            trajectory = await services.say(*said, agent_name="external", limits=LIMITS)

            assert trajectory.error is None, trajectory.error.message
            rows = [trajectory, *trajectory.further_rows]
            turns = sum(len(row.turns) for row in rows)
            assert turns >= least
            assert sum(sum(row.response_mask) for row in rows) == sum(len(encode(text)) for text in said[:turns])


async def test_the_ai_sdk_which_refers_to_items_becomes_one_row(serving: Serve) -> None:
    npm = shutil.which("npm")
    assert npm is not None, "expected npm on the PATH, got none; install Node.js"
    packages = ["ai@6", "@ai-sdk/openai@3", "zod@4"]
    subprocess.run([npm, "install", "--silent", "--prefer-offline", "--prefix", NODE, *packages], check=True)
    program = ["node", str(Path(__file__).with_name("ai_sdk_agent.cjs"))]
    settings = ExternalSettings(command=program, environment={"NODE_PATH": str(NODE / "node_modules")})
    async with serving(settings) as services:
        trajectory = await services.say(COUNT, ANSWER, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    observation = encode("\n<|im_start|>tool\n18<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.response_ids == encode(COUNT) + observation + encode(ANSWER)
    assert trajectory.further_rows == []
    assert "#### 18" in trajectory.log


async def test_an_output_type_beside_tools_guides_calls_and_the_answer_which_are_not_trained(serving: Serve) -> None:
    first, second = call("calculator", ARGUMENTS) + END, '{"count": 18}' + END
    async with serving(installed(f"{Path(__file__).with_name('output_type_sdk.py')}")) as services:
        trajectory = await services.say(first, second, agent_name="external", limits=LIMITS)
        grammars = [request.sampling_params.structured_outputs for request in services.model.seen()]

    assert trajectory.error is None, trajectory.error.message
    assert "Count(count=18)" in trajectory.log
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    tags = [grammar.structural_tag for grammar in grammars if grammar is not None]
    assert tags[0] is not None and tags == [tags[0]] * 2
    calls, answer = json.loads(tags[0])["format"]["elements"]
    assert [tag["content"]["json_schema"]["properties"].keys() for tag in calls["tags"]] == [{"expression"}]
    assert answer["json_schema"]["required"] == ["count"]
    assert sum(trajectory.response_mask) == 0
    assert train_status(trajectory, 3, None) is TrainStatus.GUIDED


async def test_smolagents_which_writes_calls_as_prose_becomes_one_row(serving: Serve) -> None:
    first = call("calculator", ARGUMENTS).removeprefix(BEGIN) + END
    second = call("final_answer", '{"answer": "#### 18"}').removeprefix(BEGIN) + END
    async with serving(installed("smolagents_agent.py")) as services:
        trajectory = await services.say(first, second, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    assert sum(trajectory.response_mask) == len(encode(first)) + len(encode(second))
    assert "#### 18" in trajectory.log


async def test_mini_swe_agent_becomes_one_row(serving: Serve) -> None:
    first = call("bash", '{"command": "echo $((9+9))"}') + END
    second = call("bash", '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 18"}') + END
    async with serving(installed("mini_swe_agent.py")) as services:
        trajectory = await services.say(first, second, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    assert sum(trajectory.response_mask) == len(encode(first)) + len(encode(second))
    assert "'submission': '18" in trajectory.log


async def test_a_code_agent_which_repeats_its_code_as_a_call_becomes_one_row(serving: Serve) -> None:
    first, second = "I print.\n<code>\nprint(9+9)\n</code>", "<code>\nfinal_answer('#### 18')\n</code>"
    async with serving(installed("smolagents_code_agent.py")) as services:
        trajectory = await services.say(first + END, second + END, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    assert sum(trajectory.response_mask) == len(encode(first)) + len(encode(second))
    assert "#### 18" in trajectory.log


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("codex_cli.py", call("exec_command", '{"cmd": "echo $((9+9))"}')),
        ("opencode_cli.py", call("bash", '{"command": "echo $((9+9))", "description": "Count"}')),
    ],
)
async def test_a_command_line_agent_becomes_one_row(serving: Serve, name: str, first: str) -> None:
    async with serving(installed_by_npm(name)) as services:
        trajectory = await services.say(first + END, ANSWER, agent_name="external", limits=LIMITS)
        encode = services.model.encode

    assert trajectory.error is None, trajectory.error.message
    assert [turn.index for turn in trajectory.turns] == [0, 1] and trajectory.further_rows == []
    assert sum(trajectory.response_mask) == len(encode(first + END)) + len(encode(ANSWER))
    assert "18\n" in trajectory.turns[0].messages[1].content and "#### 18" in trajectory.log
