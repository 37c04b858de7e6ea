"""Text completions of a session: a prompt that begins with an earlier one and its completion continues its ids."""

from typing import Any

import pytest

from tests.services.agent.agent_services import AgentServices
from tests.services.agent.scripted_model import END
from tests.services.agent.sessions.test_session import ended, opened, retry, state
from trackway.wire.sessions import NodeKind, RootReason, SessionAccess

pytestmark = pytest.mark.anyio


async def complete(
    services: AgentServices, access: SessionAccess, prompt: object, retries: int = 0, **fields: Any
) -> list[str]:
    body = {"model": "any", "prompt": prompt, "max_tokens": 99, **fields}
    path = f"/sessions/{access.session_id}/v1/completions"
    response = await services.client.post(path, json=body, headers=retry(retries))
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


@pytest.mark.parametrize("as_ids", [False, True])
async def test_a_prompt_behind_a_completion_continues_the_recorded_ids(services: AgentServices, as_ids: bool) -> None:
    access = await opened(services, "18" + END, "#### 18" + END)
    encode = services.model.encode

    def shown(text: str) -> object:
        return encode(text) if as_ids else text

    assert await complete(services, access, shown("9+9=")) == ["18"]
    assert await complete(services, access, shown(f"9+9=18{END}\nSay it: ")) == ["#### 18"]

    trajectory = await ended(services, access)
    first, second = encode("18" + END), encode("#### 18" + END)
    observation = encode("\nSay it: ")
    assert trajectory.prompt_ids == encode("9+9=") and trajectory.further_rows == []
    assert trajectory.response_ids == first + observation + second
    assert trajectory.response_mask == [1] * len(first) + [0] * len(observation) + [1] * len(second)


async def test_a_prompt_without_what_the_model_wrote_begins_another_row(services: AgentServices) -> None:
    access = await opened(services, "18" + END, "#### 18" + END)
    await complete(services, access, "9+9=")
    await complete(services, access, "9+9=18\nSay it: ")

    roots = [node.reason for node in (await state(services, access)).nodes if node.parent is None]
    assert roots == [RootReason.FIRST_CALL, RootReason.OTHER_CONVERSATION]
    assert len((await ended(services, access)).rows) == 2


@pytest.mark.parametrize("prompt", ["", [""], ["a", ""]])
async def test_an_empty_prompt_is_refused(services: AgentServices, prompt: str | list[str]) -> None:
    access = await opened(services, "a" + END, "b" + END)
    body = {"model": "any", "prompt": prompt}

    response = await services.client.post(f"/sessions/{access.session_id}/v1/completions", json=body)

    assert response.status_code == 400
    said = "prompt: expected text of at least one token, got none; send some text"
    assert response.json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("route", "prompt"),
    [("completions", {"prompt": "a"}), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})],
)
async def test_prompt_logprobs_are_refused_by_name(
    services: AgentServices, route: str, prompt: dict[str, object]
) -> None:
    access = await opened(services, "a" + END)
    body = {"model": "any", **prompt, "prompt_logprobs": 0}

    response = await services.client.post(f"/sessions/{access.session_id}/v1/{route}", json=body)

    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_each_prompt_and_choice_is_a_row_and_a_retry_is_answered_from_the_record(
    services: AgentServices,
) -> None:
    access = await opened(services, *[f"{number}{END}" for number in range(4)])
    said = await complete(services, access, ["a", "b"], n=2)
    again = await complete(services, access, ["a", "b"], retries=1, n=2)

    assert again == said and sorted(said) == ["0", "1", "2", "3"]
    kinds = [node.kind for node in (await state(services, access)).nodes]
    assert kinds == [NodeKind.PROMPT] * 2 + [NodeKind.SAMPLED] * 4 + [NodeKind.RETRY]
    trajectory = await ended(services, access)
    encode = services.model.encode
    rows = [(row.prompt_ids, row.response_ids) for row in trajectory.rows]
    prompts = ["a", "a", "b", "b"]
    assert rows == [(encode(prompt), encode(f"{text}{END}")) for prompt, text in zip(prompts, said, strict=True)]
