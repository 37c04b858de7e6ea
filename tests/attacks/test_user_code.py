"""User code that would end its process fails its own call; the service and its other instances live on."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.attacks.exiting_code import BY_TASKS, RAISED
from tests.attacks.service_process import ServiceProcess, service_process
from trackway.reward.scorers import scorers_of
from trackway.reward.settings import RewardSettings
from trackway.serving.user_code import UserCodeExit
from trackway.tools.functions import functions_of_file
from trackway.tools.loading import load_tools

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SCORED = {"data_source": "test/exiting", "solution_str": "x", "ground_truth": "y"}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    settings = {
        "function_tool_path": str(HERE / "exiting_code.py"),
        "extra_tools": '["tests.attacks.exiting_code:Hooked"]',
        "tools": '["calculator"]',
    }
    with service_process("tools", tmp_path_factory.mktemp("tools"), settings) as service:
        yield service


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    settings = {"extra_scorers": '["tests.attacks.exiting_code:ExitingScorer"]'}
    with service_process("reward", tmp_path_factory.mktemp("reward"), settings) as service:
        yield service


def failure(response: httpx.Response) -> tuple[int, str, str]:
    """Status, code and message, without the place in the user's code."""
    error = response.json()["error"]
    return response.status_code, error["code"], re.sub(r" \(/\S+:\d+\)", "", error["message"])


def lives(service: ServiceProcess) -> bool:
    return service.process.poll() is None and service.http.get("/health").json()["pid"] == service.process.pid


@pytest.mark.parametrize(("tool", "ways"), [("in_thread", RAISED), ("on_loop", RAISED | BY_TASKS)])
def test_a_function_tool_that_exits_fails_its_call_alone(
    tools: ServiceProcess, tool: str, ways: dict[str, str]
) -> None:
    other_id = tools.http.post("/instances", json={"tool": "calculator"}).json()["instance_id"]

    failed = {how: failure(tools.http.post(f"/tools/{tool}/execute", json={"arguments": {"how": how}})) for how in ways}

    assert failed == {
        how: (500, "tool_failed", f"tool {tool!r} failed in execute: {what}") for how, what in ways.items()
    }
    kept = tools.http.post(f"/instances/{other_id}/execute", json={"arguments": {"expression": "6*7"}})
    assert (kept.json()["text"], lives(tools)) == ("42", True)


def test_a_generator_that_exits_while_its_result_is_read_fails_its_call_alone(tools: ServiceProcess) -> None:
    answers = [tools.http.post("/tools/generated/execute", json={"arguments": {"how": how}}) for how in RAISED]

    assert {failure(answer)[:2] for answer in answers} == {(500, "tool_failed")}
    assert lives(tools)


@pytest.mark.parametrize("hook", ["create", "coerce", "execute", "calc_reward", "release"])
def test_a_class_tool_may_exit_in_every_hook(tools: ServiceProcess, hook: str) -> None:
    failed = {how: failure(reached(tools.http, hook, how)) for how in RAISED}

    assert failed == {
        how: (500, "tool_failed", f"tool 'hooked' failed in {hook}: {what}") for how, what in RAISED.items()
    }
    assert lives(tools)


def reached(http: httpx.Client, hook: str, how: str) -> httpx.Response:
    """The answer of the request that calls the hook."""
    created = http.post("/instances", json={"tool": "hooked", "create_kwargs": {"hook": hook, "how": how}})
    if hook == "create":
        return created
    instance = f"/instances/{created.json()['instance_id']}"
    if hook == "release":
        return http.delete(instance)
    if hook == "calc_reward":
        return http.post(f"{instance}/reward")
    return http.post(f"{instance}/execute", json={"arguments": {"how": how} if hook == "coerce" else {}})


def test_a_scorer_that_exits_fails_its_score_alone(reward: ServiceProcess) -> None:
    ways = RAISED | BY_TASKS

    failed = {how: failure(reward.http.post("/score", json={**SCORED, "method": how})) for how in ways}
    fine = reward.http.post("/score", json=SCORED)

    told = {
        how: (500, "internal", f"scorer 'exiting' failed: {what}; the reward service logged the traceback")
        for how, what in ways.items()
    }
    assert failed == told
    assert (fine.json()["score"], lives(reward)) == (0.5, True)


def test_a_module_that_exits_on_import_is_named() -> None:
    with pytest.raises(
        UserCodeExit, match=r"function_tool_path '.*exiting_module.py': it called sys.exit\(7\) on import"
    ):
        functions_of_file(HERE / "exiting_module.py")
    with pytest.raises(
        UserCodeExit, match=r"setting extra_tools, 'tests.attacks.exiting_module:x': it called sys.exit\(7\)"
    ):
        load_tools([], ["tests.attacks.exiting_module:x"], {})
    with pytest.raises(
        UserCodeExit, match=r"setting extra_scorers, 'tests.attacks.exiting_module:x': it called sys.exit\(7\)"
    ):
        scorers_of(RewardSettings(extra_scorers=["tests.attacks.exiting_module:x"]))
