"""Who may name code: the deployment's settings, or an operator's run. Requests of others import nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.services.serving.service_with_tokens import AGENT, OPERATOR, TOKENS, bearer
from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.deploy.bundled import TINY_MODEL
from trackway.reward.app import create_app as create_reward
from trackway.reward.settings import RewardSettings
from trackway.serving import AuthSettings
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.trainer.app import create_app as create_trainer
from trackway.trainer.settings import TrainerSettings

pytestmark = pytest.mark.anyio

AUTH = AuthSettings.model_validate({"tokens": TOKENS})
SAMPLE = {
    "data_source": "me/sums",
    "prompt": [{"role": "user", "content": "9+9?"}],
    "reward_model": {"ground_truth": "18"},
    "extra_info": {"index": 0},
}
GROUP: dict[str, Any] = {"run": "r", "experiment_name": "e", "step": 1, "sample": SAMPLE}
SCORE: dict[str, Any] = {"data_source": "openai/gsm8k", "solution_str": "#### 1", "ground_truth": "1"}


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that anybody could import, and that says when it was."""
    (tmp_path / "planted.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w')\ndef compute_score(**row): return 1"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def untouched(folder: Path) -> bool:
    return not (folder / "imported").exists() and "planted" not in sys.modules


async def post(app: FastAPI, path: str, body: object, token: str) -> httpx.Response:
    transport = httpx.ASGITransport(app=app, client=("10.1.2.3", 1))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://service") as client,
    ):
        return await client.post(path, json=body, headers=bearer(token))


def run_of(folder: Path) -> dict[str, object]:
    file = str(folder / "planted.py")
    own = {"modules": ["planted"], "code_path": str(folder)}
    config = {
        "trackway": own,
        "custom_reward_function": {"path": file},
        "actor_rollout_ref": {"rollout": {"multi_turn": {"function_tool_path": file}}, "model": {"path": "m"}},
        "data": {"train_files": [file]},
    }
    return {"config": config, "run": "attack"}


async def test_a_run_that_names_code_needs_an_operators_token(planted: Path) -> None:
    app = create_trainer(TrainerSettings(outputs_dir=str(planted / "outputs"), auth=AUTH))

    answer = await post(app, "/runs", run_of(planted), AGENT)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "forbidden")
    assert error["message"].startswith("expected a token with the scope 'admin', got 'agents' with 'execute'")
    assert untouched(planted)
    assert not (planted / "outputs" / "attack").exists()


async def test_the_trainer_itself_imports_no_code_of_a_run(planted: Path) -> None:
    app = create_trainer(
        TrainerSettings(outputs_dir=str(planted / "outputs"), auth=AUTH, base_url="http://127.0.0.1:9")
    )

    await post(app, "/runs", run_of(planted), OPERATOR)

    assert untouched(planted)


@pytest.mark.parametrize("token", [AGENT, OPERATOR])
@pytest.mark.parametrize(
    "field",
    [
        {"modules": ["planted"]},
        {"agent_loop_config_path": "loops.yaml"},
        {"code_path": "/"},
        {"tool_parser": "planted"},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_a_group_cannot_name_code(planted: Path, token: str, field: dict[str, object]) -> None:
    app = create_agent(AgentSettings(model_path=str(TINY_MODEL), auth=AUTH))

    answer = await post(app, "/groups", {**GROUP, **field}, token)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "invalid_request")
    assert next(iter(field)) in answer.json()["error"]["message"]
    assert untouched(planted)


@pytest.mark.parametrize("name", ["planted", "planted.Loop", "planted:Loop", "../planted"])
async def test_a_rows_agent_name_is_looked_up_and_never_imported(planted: Path, name: str) -> None:
    app = create_agent(AgentSettings(model_path=str(TINY_MODEL), auth=AUTH))

    answer = await post(app, "/groups", {**GROUP, "sample": {**SAMPLE, "agent_name": name}}, AGENT)

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_agent")
    assert untouched(planted)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"custom_reward_function": {"path": "planted.py"}}, "invalid_request"),
        ({"data_source": "planted:compute_score"}, "unknown_data_source"),
        ({"method": "planted.compute_score"}, "invalid_request"),
    ],
)
async def test_a_score_cannot_name_code(planted: Path, changes: dict[str, object], code: str) -> None:
    app = create_reward(RewardSettings(auth=AUTH))

    answer = await post(app, "/score", {**SCORE, **changes}, OPERATOR)

    assert (answer.status_code, answer.json()["error"]["code"]) == (422, code)
    assert untouched(planted)


@pytest.mark.parametrize(
    ("path", "code"),
    [("/tools/planted/execute", "unknown_tool"), ("/tools/planted:compute_score/execute", "invalid_request")],
)
async def test_a_tool_is_looked_up_and_never_imported(planted: Path, path: str, code: str) -> None:
    answer = await post(create_tools(ToolsSettings(auth=AUTH)), path, {"arguments": {}}, OPERATOR)
    created = await post(
        create_tools(ToolsSettings(auth=AUTH)),
        "/instances",
        {"tool": "planted", "class_name": "planted.Tool"},
        OPERATOR,
    )

    assert answer.json()["error"]["code"] == code
    assert created.status_code in (404, 422)
    assert untouched(planted)


async def test_no_route_takes_code(planted: Path) -> None:
    agent = create_agent(AgentSettings(model_path=str(TINY_MODEL)))
    apps = [agent, create_reward(RewardSettings()), create_tools(ToolsSettings())]
    named = {"modules", "code_path", "custom_reward_function", "agent_loop_config_path", "function_tool_path"}

    for app in apps:
        schemas = app.openapi()["components"]["schemas"]
        requests = {name: schema for name, schema in schemas.items() if name.endswith("Request")}
        assert requests
        assert not named & {field for schema in requests.values() for field in schema.get("properties", {})}
        assert "planted" not in json.dumps(schemas)
