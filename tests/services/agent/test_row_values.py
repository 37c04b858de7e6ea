"""Ordinary and wrong values of a row and of a request's names: what runs end to end, and what is refused by name."""

from typing import Any

import pytest

from tests.services.agent.agent_services import AgentServices, call, group
from tests.services.agent.scripted_model import END

pytestmark = pytest.mark.anyio

COUNT, ANSWER = call("counter") + END, "#### 18" + END


def body(**changes: object) -> dict[str, Any]:
    return {**group().model_dump(mode="json"), **changes}


@pytest.mark.parametrize(
    ("run", "index", "name"),
    [
        ("demo", 17, "demo/1/17/0"),
        ("demo", "django__django-11099", "demo/1/django__django-11099/0"),
        ("demo", "hotpot/ü 1", "demo/1/hotpot/ü 1/0"),
        ("München", "東京", "München/1/東京/0"),
        ("a" * 128, "ü" * 128, f"{'a' * 128}/1/{'ü' * 128}/0"),
    ],
)
async def test_a_row_is_followed_by_its_index_whatever_its_script(
    services: AgentServices, run: str, index: int | str, name: str
) -> None:
    row = {"index": index, "tools_kwargs": {"counter": {"create_kwargs": {"a": 1}}}}

    trajectory = await services.say(COUNT, ANSWER, run=run, sample__extra_info=row, trace=True)

    assert (trajectory.error, trajectory.id, trajectory.session_id) == (None, name, name)
    assert trajectory.tags.sample_index == index
    assert trajectory.reward is not None and trajectory.reward.score == 1.0
    assert services.counter.given == [{"a": 1}]
    [root] = [span for span in services.spans() if span.parent is None]
    assert root.attributes is not None
    assert root.attributes["agentic.tag.sample_index"] == index


@pytest.mark.parametrize(
    ("extra_info", "told"),
    [
        ({"index": "a\nb"}, r"index: expected a whole number or 1 to 128 printable characters, got 'a\nb'"),
        ({"index": True}, "index: expected a whole number or 1 to 128 printable characters, got True"),
        ({"index": [1]}, r"index: expected a whole number or 1 to 128 printable characters, got [1]"),
        ({"tools_kwargs": "zz"}, "tools_kwargs: expected an object, got str"),
        ({"tools_kwargs": {"counter": [1]}}, "tools_kwargs.counter: expected an object, got list"),
        (
            {"tools_kwargs": {"counter": {"create_kwargs": 7}}},
            "tools_kwargs.counter.create_kwargs: expected an object, got int",
        ),
        ({"tool_selection": "counter"}, "tool_selection: expected a list of tools' names, got str"),
        ([], "extra_info: Input should be an object"),
    ],
)
async def test_a_wrong_value_of_a_row_is_refused_by_its_field(
    services: AgentServices, extra_info: object, told: str
) -> None:
    response = await services.client.post("/groups", json=body(sample={**body()["sample"], "extra_info": extra_info}))

    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")
    assert "sample.extra_info: " in response.json()["error"]["message"]
    assert told in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra_info", [{}, {"index": None}, {"tools_kwargs": None}, {"tools_kwargs": {"counter": None}}]
)
async def test_what_a_row_does_not_say_is_no_mistake(services: AgentServices, extra_info: dict[str, object]) -> None:
    trajectory = await services.say(COUNT, ANSWER, sample__extra_info=extra_info)

    assert (trajectory.error, trajectory.id) == (None, "run-a/1/0/0")


@pytest.mark.parametrize("name", ["", "..", "a/b", "a\nb", "a\x1b[0m", "a b"])
async def test_a_run_with_a_name_that_is_none_is_refused(services: AgentServices, name: str) -> None:
    response = await services.client.post("/groups", json=body(run=name))

    assert response.status_code == 422
    assert "body.run: Value error, expected a run name of letters, digits" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["", "a\nb", "../..", "a\x1b[0m"])
async def test_an_experiment_with_a_name_that_is_none_is_refused(services: AgentServices, name: str) -> None:
    response = await services.client.post("/groups", json=body(experiment_name=name))

    assert response.status_code == 422
    assert "body.experiment_name: Value error, expected a name of" in response.json()["error"]["message"]
