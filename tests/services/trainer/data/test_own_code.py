"""A run is refused when a service has not loaded the own code that it names."""

import pytest

from trackway.run_config import compose
from trackway.trainer.data.own_code import not_loaded
from trackway.wire.service import OwnCode

pytestmark = pytest.mark.slow

LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
ALL = ["trackway.modules=[my_agent]", "custom_reward_function.path=/p/rewards.py", f"{LOOPS}=/p/loops.yaml"]


def code(*files: str, modules: tuple[str, ...] = ("my_agent",)) -> OwnCode:
    return OwnCode(digest="0" * 16, modules=[*modules], files=[*files])


def test_what_is_loaded_is_no_problem() -> None:
    loaded = {"agent": code("loops.yaml"), "tools": code(), "reward": code("rewards.py")}

    assert not_loaded(compose(ALL), loaded) == []


def test_a_run_without_own_code_needs_none() -> None:
    assert not_loaded(compose([]), {"agent": None, "tools": None, "reward": code("rewards.py")}) == []


def test_a_service_that_did_not_answer_is_no_problem() -> None:
    assert not_loaded(compose(ALL), {}) == []


@pytest.mark.parametrize(
    ("service", "own", "message"),
    [
        ("tools", None, "trackway.modules: expected the tools service to have loaded my_agent, it has loaded none"),
        ("tools", code(modules=("other",)), "expected the tools service to have loaded my_agent, it has loaded other;"),
        (
            "reward",
            code("other.py"),
            "custom_reward_function.path: expected the reward service to have loaded /p/rewards.py",
        ),
        ("agent", code(), f"{LOOPS}: expected the agent service to have loaded /p/loops.yaml"),
    ],
)
def test_what_is_not_loaded_is_told_by_key_and_service(service: str, own: OwnCode | None, message: str) -> None:
    loaded = {"agent": code("loops.yaml"), "tools": code(), "reward": code("rewards.py"), service: own}

    problems = not_loaded(compose(ALL), loaded)

    assert len(problems) == 1
    assert message in problems[0]


def test_functions_of_another_run_are_named_and_its_own_are_no_problem() -> None:
    loaded = {"agent": None, "tools": code("functions-mine.json"), "reward": code("functions-mine.json", "rewards.py")}

    assert not_loaded(compose(["trackway.functions_file=/outputs/.deployment/functions-mine.json"]), loaded) == []
    assert not_loaded(compose([]), loaded) == [
        "expected tools and a reward service without functions of another Python process, got those of mine; end it "
        "there with wait() or stop(), or start the services again: `trackway down`, `trackway up`"
    ]
